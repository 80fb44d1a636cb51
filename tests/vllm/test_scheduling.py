"""What vLLM's scheduler does to requests meanwhile: prompts in pieces, and requests that lose
their blocks and come back.
"""

from __future__ import annotations

from tests.vllm.engines import CHUNK_SIZE, Ask, running_engine
from tests.vllm.models import LLAMA
from tests.vllm.references import assert_same, prompt
from tests.vllm.sidecars import Growth
from tests.vllm.worlds import World, whole_chunks

BATCH_TOLERANCE = 1e-4
"""Requests that are decoded together are added up in another order than one that is alone, two
hundred times over.
"""


def test_prompts_that_are_computed_in_pieces(world: World) -> None:
    """Pieces end in the middle of blocks and of chunks, and other requests stand between them."""
    sidecar = world.sidecar()
    asks = [Ask(prompt(20, 1500)), Ask(prompt(21, 700)), Ask(prompt(20, 900) + prompt(22, 300))]
    with running_engine(world.options(max_num_batched_tokens=200, max_num_seqs=4)) as engine:
        stored = Growth(sidecar)
        cold = engine.generate(asks)
        stored.reaches(whole_chunks(1500, 700) + 1)
        engine.reset()
        hits = engine.generate(asks)
        assert [answer.num_cached for answer in hits] == [
            5 * CHUNK_SIZE,
            2 * CHUNK_SIZE,
            4 * CHUNK_SIZE,
        ]
    world.references.check([*cold, *hits], [*asks, *asks], LLAMA)


def test_requests_that_are_preempted_and_resumed(world: World) -> None:
    sidecar = world.sidecar()
    asks = [Ask(prompt(23 + i, 380), num_new=200) for i in range(3)]
    few = world.options(
        lmcache_save_decode_cache=True, num_gpu_blocks_override=12, max_model_len=1024
    )
    with running_engine(few) as engine:
        stored = Growth(sidecar)
        cold = engine.generate(asks)
        assert engine.metrics()["vllm:num_preemptions"] > 0, (
            "there was room for all: the test tests nothing"
        )
        stored.reaches(2 * len(asks))
        engine.reset()
        hits = engine.generate(asks)
        assert all(answer.num_cached >= CHUNK_SIZE for answer in hits)
        alone = [engine.ask(ask) for ask in asks]
    expected = world.references.answers(asks, LLAMA)
    for answer, wanted in zip(
        [*cold, *hits, *alone], [*expected, *expected, *expected], strict=True
    ):
        assert_same(answer, wanted, BATCH_TOLERANCE)
