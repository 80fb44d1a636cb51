"""The second turn of a conversation finds the KV of the first answer, if that is asked for."""

from __future__ import annotations

import pytest

from tests.vllm.engines import CHUNK_SIZE, Ask, running_engine
from tests.vllm.models import LLAMA
from tests.vllm.references import prompt
from tests.vllm.sidecars import Growth
from tests.vllm.worlds import World


@pytest.mark.parametrize("saves", [True, False])
def test_the_answer_is_found_in_the_next_turn(world: World, saves: bool) -> None:
    sidecar = world.sidecar()
    first = Ask(prompt(40, 600), num_new=250)
    with running_engine(world.options(lmcache_save_decode_cache=saves)) as engine:
        stored = Growth(sidecar)
        answer = engine.ask(first)
        stored.reaches(3 if saves else 2)
        engine.reset()
        second = Ask(first.tokens + answer.tokens + prompt(41, 50))
        found = engine.ask(second)
        assert found.num_cached == (3 if saves else 2) * CHUNK_SIZE
        stored.reaches(3)
        assert stored.num_chunks == 3
    world.references.check([answer, found], [first, second], LLAMA)
