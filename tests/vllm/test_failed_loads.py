"""Loads that were promised and fail: both policies of vLLM, and the trap of offering the same again
for ever.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.vllm.engines import CHUNK_SIZE, Ask, running_engine
from tests.vllm.models import LLAMA, SLIDING
from tests.vllm.references import prompt
from tests.vllm.sidecars import await_calm
from tests.vllm.worlds import BOUND_S, World, with_second_connector

STILL_S = 60.0
"""No step of a tiny model is so late that nothing has ended by then."""


class NothingComes:
    """The chunk store promises as ever, and delivers nothing."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_loads = 0
        from lmcache_core.sidecar import SidecarChunkStore

        patch.setattr(SidecarChunkStore, "get", self._get)

    def _get(self, *_: Any, **__: Any) -> list[Any]:
        self.num_loads += 1
        return []


@pytest.mark.parametrize("model", [LLAMA, SLIDING])
@pytest.mark.smoke
def test_recompute(world: World, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """The trap: vLLM asks again after a failed load, and would be offered the same, thousands of
    times a second.
    """
    sidecar = world.sidecar()
    ask, branch = Ask(prompt(50, 1000)), Ask(prompt(50, 700) + prompt(51, 200))
    with running_engine(world.options(model)) as engine:
        engine.ask(ask)
        await_calm(sidecar)
        engine.reset()
        nothing = NothingComes(monkeypatch)
        failed = engine.ask(ask)
        assert nothing.num_loads > 0, "nothing was loaded: the test tests nothing"
        assert failed.took_s < BOUND_S
        engine.reset()
        both = engine.generate([ask, branch])
        assert both[0].took_s < BOUND_S
        monkeypatch.undo()
        engine.reset()
        again = engine.ask(ask)
    world.references.check([failed, *both, again], [ask, ask, branch, ask], model)


def test_fail(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM then does is end the request, and only that."""
    sidecar = world.sidecar()
    ask, other = Ask(prompt(52, 1000)), Ask(prompt(53, 500))
    with running_engine(world.options(policy="fail")) as engine:
        engine.ask(ask)
        await_calm(sidecar)
        engine.reset()
        hit = engine.ask(ask)
        assert hit.num_cached == 3 * CHUNK_SIZE
        engine.reset()
        nothing = NothingComes(monkeypatch)
        failed, unharmed = engine.generate([ask, other])
        assert nothing.num_loads > 0
        assert (failed.finish_reason, failed.tokens) == ("error", ())
        monkeypatch.undo()
        engine.reset()
        again = engine.ask(ask)
    world.references.check([hit, unharmed, again], [ask, other, ask], LLAMA)


@pytest.mark.smoke
def test_two_of_ours_whose_loads_fail_one_after_the_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps blocks back for each load that is underway, and forgets to end that when a load
    fails as a whole: the request would wait for its own blocks if it were to load again, and those
    behind it for theirs.
    """
    from vllm import SamplingParams

    sidecar = world.sidecar()
    asks = [Ask(prompt(54 + i, 1000)) for i in range(3)]
    options = world.options(num_gpu_blocks_override=29, max_model_len=1280)
    with running_engine(with_second_connector(options, options["kv_transfer_config"])) as engine:
        engine.generate(asks)
        await_calm(sidecar)
        engine.reset()
        nothing = NothingComes(monkeypatch)
        core = engine.llm.llm_engine
        for i, ask in enumerate(asks):
            tokens, how = {"prompt_token_ids": list(ask.tokens)}, SamplingParams(max_tokens=4)
            core.add_request(str(i), tokens, how)
        deadline = time.monotonic() + STILL_S
        while core.has_unfinished_requests():
            core.step()
            assert time.monotonic() < deadline, "vLLM stands still"
        assert nothing.num_loads == len(asks)
