"""KV from elsewhere: from a peer's sidecar, from a remote tier that hangs, and from another
connector.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vllm.engines import CHUNK_SIZE, Answer, Ask, Engine, release, running_engine
from tests.vllm.models import LLAMA
from tests.vllm.references import TOLERANCES, distance, prompt
from tests.vllm.rubbish import ASYNC, FAILING, PARAMETER, SYNC
from tests.vllm.sidecars import Growth, SilentServer, await_calm, eventually, neighbourhood
from tests.vllm.worlds import BOUND_S, World, fill, with_second_connector


def test_two_vllms_with_two_sidecars(world: World) -> None:
    """Both live at the same time; the second gets from the first one's sidecar what it never
    computed.
    """
    known = neighbourhood(world.owner)
    sidecars = [world.sidecar(name, **known) for name in ("a", "b")]
    for sidecar in sidecars:
        eventually(lambda sidecar=sidecar: sidecar.get("/v1/status")["registered"], "registered")
    ask = Ask(prompt(260, 1000))
    other = world.owner.engine("other")
    with running_engine(world.options(at="a")) as engine:
        fill(engine, sidecars[0], ask)
        eventually(lambda: sidecars[0].get("/v1/status")["settled"], "announced")
        other.open(world.options(at="b"))
        hit = other.ask(ask)
        assert hit.num_cached == 3 * CHUNK_SIZE
        other.reset()
        again = other.ask(ask)
        assert again.num_cached == 3 * CHUNK_SIZE, "now out of its own sidecar's memory"
        figures = other.metrics()
        assert figures["vllm:lmcache_stored_chunks"] == 0, "it has nothing of its own"
        if release() >= (0, 32):  # older ones have one word for all sources
            by_source = "vllm:prompt_tokens_cached_by_source"
            assert (
                figures[f"{by_source}{{source=p2p}}"]
                == figures[f"{by_source}{{source=host}}"]
                == 3 * CHUNK_SIZE
            )
    world.references.check([hit, again], [ask, ask], LLAMA)


def test_a_remote_tier_that_hangs(world: World) -> None:
    """It takes connections and never says a word. Requests wait a bounded time, then not at all,
    and memory goes on serving.
    """
    with SilentServer() as silent:
        sidecar = world.sidecar(
            remote_url=f"lm://127.0.0.1:{silent.port}", tier_timeout_s=1.0, drain_timeout_s=0.5
        )
        asks = [Ask(prompt(261 + i, 1000)) for i in range(3)]
        with running_engine(world.options(lmcache_tier_timeout_s=1.0)) as engine:
            stored = Growth(sidecar)
            cold = [engine.ask(ask) for ask in asks]
            assert silent.num_accepted > 0, "it was never asked"
            assert max(answer.took_s for answer in cold) < BOUND_S
            stored.reaches(9)
            engine.reset()
            hits = [engine.ask(ask) for ask in asks]
            assert [answer.num_cached for answer in hits] == [3 * CHUNK_SIZE] * 3
            engine.reset()
            longer = Ask(asks[0].tokens + prompt(265, 600))
            partly = engine.ask(longer)
            assert partly.num_cached >= 3 * CHUNK_SIZE, (
                "what is in memory is used though the rest is not to be had"
            )
            assert partly.took_s < BOUND_S
    world.references.check([*cold, *hits, partly], [*asks, *asks, longer], LLAMA)


@pytest.mark.parametrize("way", [ASYNC, SYNC, FAILING])
def test_what_another_connector_loads_reaches_no_other_engine(world: World, way: str) -> None:
    """It loads rubbish. vLLM itself offers that to later requests; our connector stores neither
    that nor what is computed from it.
    """
    sidecar = world.sidecar()
    first, longer, clean = Ask(prompt(270, 1000)), Ask(prompt(270, 1400)), Ask(prompt(271, 700))
    rubbish = {
        "kv_connector": "RubbishConnector",
        "kv_connector_module_path": "tests.vllm.rubbish",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"way": way},
    }
    with running_engine(with_second_connector(world.options(), rubbish)) as engine:
        stored = Growth(sidecar)
        asked = replace(first, transfer={PARAMETER: 3 * CHUNK_SIZE})
        if way == FAILING:
            hang_up_in_the_first_step(engine, asked)
        else:
            assert is_wrong(world, engine.ask(asked), first)
        wrong = engine.ask(longer)
        assert wrong.num_cached >= 3 * CHUNK_SIZE, "vLLM does not offer the rubbish"
        assert is_wrong(world, wrong, longer)
        right = engine.ask(clean)
        stored.reaches(2)
        await_calm(sidecar)
        assert stored.num_chunks == 2, "rubbish is stored"
        engine.reset()
        again = engine.ask(first)
        stored.reaches(5)
    world.references.check([right, again], [clean, first], LLAMA)


def hang_up_in_the_first_step(engine: Engine, ask: Ask) -> None:
    """A client that goes when vLLM has been told that the load has failed, and has computed
    nothing of it again.
    """
    from vllm import SamplingParams

    core = engine.llm.llm_engine
    how = SamplingParams(extra_args={"kv_transfer_params": ask.transfer})
    core.add_request("gone", {"prompt_token_ids": list(ask.tokens)}, how)
    while not engine.scheduler.running:
        core.step()
    core.abort_request(["gone"])


def is_wrong(world: World, answer: Answer, ask: Ask) -> bool:
    (expected,) = world.references.answers([ask], LLAMA)
    return distance(answer, expected) > TOLERANCES["float32"]
