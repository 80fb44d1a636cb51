"""Drafts: tokens that vLLM guesses and then checks. Hits with drafts give the same answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.vllm.engines import CHUNK_SIZE, Ask, Engine, running_engine
from tests.vllm.models import EAGLE, LLAMA, LOCAL, MTP, SLIDING
from tests.vllm.processes import EngineProcess
from tests.vllm.references import prompt
from tests.vllm.sidecars import Growth, await_calm
from tests.vllm.worlds import World, fill, whole_chunks

pytestmark = pytest.mark.since("0.31")

REPEATED = prompt(60, 300) * 3
"""A prompt in which later tokens can be looked up."""
WHOLE = Ask(REPEATED, num_new=40)
BRANCH = Ask(REPEATED[:700] + prompt(61, 200), num_new=40)
LOOKUP = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def _drafting(world: World, model: str, drafts: dict[str, Any], **options: Any) -> EngineProcess:
    """Return an engine in its own process: prompt lookup imports numba, and vLLM cannot start a
    second engine in a process that has imported it.
    """
    engine = world.owner.engine("drafting")
    engine.open(world.options(model, speculative_config=world.speculative(drafts), **options))
    return engine


@pytest.mark.parametrize(
    ("model", "drafts"),
    [
        (LLAMA, {"method": "draft_model", "model": LLAMA}),
        pytest.param(LLAMA, {"method": "eagle", "model": EAGLE}, marks=pytest.mark.smoke),
        (MTP, {"method": "mtp"}),
        (SLIDING, {"method": "eagle", "model": EAGLE}),
    ],
    ids=["draft_model", "eagle", "mtp", "eagle of windows"],
)
def test_a_draft_model_whose_kv_is_cached_too(
    world: World, model: str, drafts: dict[str, Any]
) -> None:
    sidecar = world.sidecar()
    engine = _drafting(world, model, drafts)
    stored = Growth(sidecar)
    cold = engine.ask(WHOLE)
    stored.reaches(whole_chunks(len(WHOLE.tokens)))
    engine.reset()
    hit, branched = engine.ask(WHOLE), engine.ask(BRANCH)
    engine.reset()
    both = engine.generate([BRANCH, WHOLE])
    assert cold.num_cached == 0
    assert hit.num_cached == whole_chunks(len(WHOLE.tokens)) * CHUNK_SIZE
    assert all(answer.num_cached >= 2 * CHUNK_SIZE for answer in (branched, *both))
    assert engine.metrics()["vllm:spec_decode_num_draft_tokens"] > 0
    world.references.check(
        [cold, hit, branched, *both], [WHOLE, WHOLE, BRANCH, BRANCH, WHOLE], model
    )


@pytest.mark.parametrize("model", [SLIDING, pytest.param(LOCAL, marks=pytest.mark.smoke)])
def test_prompt_lookup_shares_kv_with_engines_without_drafts(world: World, model: str) -> None:
    """It has no KV of its own."""
    sidecar = world.sidecar()
    with running_engine(world.options(model)) as plain:
        fill(plain, sidecar, WHOLE)
    engine = _drafting(world, model, LOOKUP)
    hit, branched = engine.ask(WHOLE), engine.ask(BRANCH)
    assert hit.num_cached == whole_chunks(len(WHOLE.tokens)) * CHUNK_SIZE
    assert branched.num_cached >= 2 * CHUNK_SIZE
    assert engine.metrics()["vllm:spec_decode_num_draft_tokens"] > 0
    world.references.check([hit, branched], [WHOLE, BRANCH], model)


def test_a_session_reaches_no_other_engine(world: World) -> None:
    """It continues wrongly where a turn has ended among accepted drafts, and vLLM offers that to
    later requests. Neither is stored.
    """
    sidecar = world.sidecar()
    drafts = world.speculative({"method": "draft_model", "model": LLAMA})
    with running_engine(world.options(speculative_config=drafts)) as engine:
        first, then = prompt(64, 300), prompt(65, 400)
        answer = _turn(engine, first, 2)
        _turn(engine, then, 2)
        whole = Ask(first + answer + then + prompt(66, 200))
        engine.llm.llm_engine.engine_core.engine_core.abort_requests(["session"])
        longer = engine.ask(whole)
        assert longer.num_cached >= 2 * CHUNK_SIZE, "vLLM does not offer it: the test tests nothing"
        stored = Growth(sidecar)
        clean = Ask(prompt(67, 600))
        engine.ask(clean)
        stored.reaches(2)
        await_calm(sidecar)
        assert stored.num_chunks == 2
        engine.reset()
        again = engine.ask(whole)
    world.references.check([again], [whole], LLAMA)


def _turn(engine: Engine, tokens: Sequence[int], num_new: int) -> tuple[int, ...]:
    """Give a session its next input; its answer."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    core = engine.llm.llm_engine.engine_core.engine_core
    request = EngineCoreRequest(
        request_id="session",
        prompt_token_ids=list(tokens),
        mm_features=None,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        resumable=True,
    )
    core.add_request(*core.preprocess_add_request(request))
    answer: list[int] = []
    while len(answer) < num_new:
        outputs, has_run = core.step()
        core.post_step(has_run)
        for of_client in outputs.values():
            answer += [token for one in of_client.outputs for token in one.new_token_ids]
    return tuple(answer)
