"""KV that was computed once is not computed again, and the answers stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vllm.engines import CHUNK_SIZE, Ask, running_engine
from tests.vllm.models import LLAMA
from tests.vllm.references import prompt
from tests.vllm.sidecars import Growth
from tests.vllm.worlds import World, fill, whole_chunks


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.smoke)])
def test_cold_hit_and_shared_prefix(world: World, dtype: str) -> None:
    sidecar = world.sidecar()
    first, branch, other = (
        Ask(prompt(1, 1000)),
        Ask(prompt(1, 640) + prompt(2, 300)),
        Ask(prompt(3, 900)),
    )
    with running_engine(world.options(dtype=dtype)) as engine:
        stored = Growth(sidecar)
        cold = engine.ask(first)
        assert cold.num_cached == 0
        again = engine.ask(first)
        assert again.num_cached == 896, "vLLM's own prefix cache"
        stored.reaches(whole_chunks(1000))
        engine.reset()
        hit = engine.ask(first)
        assert hit.num_cached == 3 * CHUNK_SIZE
        engine.reset()
        branched = engine.ask(branch)
        assert branched.num_cached == 2 * CHUNK_SIZE, "of the 640 tokens that both have"
        stored.reaches(whole_chunks(1000) + 1)
        engine.reset()
        strange = engine.ask(other)
        assert strange.num_cached == 0
        stored.reaches(whole_chunks(1000, 900) + 1)
        engine.reset()
        both = engine.generate([branch, other])
        assert [answer.num_cached for answer in both] == [3 * CHUNK_SIZE, 3 * CHUNK_SIZE]
    world.references.check(
        [cold, again, hit, branched, strange, *both],
        [first, first, first, branch, other, branch, other],
        LLAMA,
        dtype,
    )


def test_prompt_embeddings(world: World) -> None:
    """Those of tokens, so that the answers are known; KV is not shared with the tokens' own."""
    sidecar = world.sidecar()
    asks = [Ask(prompt(6, 1000)), Ask(prompt(6, 640) + prompt(7, 300))]
    embedded = [replace(ask, embedded_by=str(world.models / LLAMA)) for ask in asks]
    with running_engine(world.options(enable_prompt_embeds=True)) as engine:
        fill(engine, sidecar, asks[0])
        stored = Growth(sidecar)
        cold = engine.ask(embedded[0])
        stored.reaches(whole_chunks(1000))
        answers = []
        for one in embedded:
            engine.reset()
            answers.append(engine.ask(one))
    assert [answer.num_cached for answer in (cold, *answers)] == [0, 3 * CHUNK_SIZE, 2 * CHUNK_SIZE]
    world.references.check([cold, *answers], [asks[0], *asks], LLAMA)


def test_two_requests_at_once_that_share_a_prefix(world: World) -> None:
    sidecar = world.sidecar()
    short, long = Ask(prompt(4, 600)), Ask(prompt(4, 600) + prompt(5, 500))
    with running_engine(world.options()) as engine:
        fill(engine, sidecar, long)
        both = engine.generate([short, long])
        assert [answer.num_cached >= 512 for answer in both] == [True, True]
        engine.reset()
        swapped = engine.generate([long, short])
        assert swapped[0].num_cached >= 1024
    world.references.check([*both, *swapped], [short, long, long, short], LLAMA)


@pytest.mark.smoke
def test_logprobs_of_the_prompt(world: World) -> None:
    """vLLM has them of tokens that it computes: nothing is loaded for such a request. What it
    computes is stored.
    """
    sidecar = world.sidecar()
    asking, plain = Ask(prompt(7, 900), prompt_logprobs=3), Ask(prompt(7, 900))
    with running_engine(world.options()) as engine:
        fill(engine, sidecar, asking)
        again = engine.ask(asking)
        assert again.num_cached == 0
        engine.reset()
        hit = engine.ask(plain)
        assert hit.num_cached == 3 * CHUNK_SIZE
    world.references.check([again, hit], [asking, plain], LLAMA)


def test_prompts_that_end_with_a_chunk(world: World) -> None:
    """At least one token has to be computed, or there is nothing to sample from. Loaded
    asynchronously, a prompt may be there as a whole; vLLM then computes its last token again.
    """
    sidecar = world.sidecar()
    asks = [Ask(prompt(6 + i, 4 * CHUNK_SIZE + i)) for i in (-1, 0, 1)]
    with running_engine(world.options()) as engine:
        for ask in asks:
            fill(engine, sidecar, ask)
        hits = [engine.ask(ask) for ask in asks]
        assert hits[0].num_cached == 3 * CHUNK_SIZE
        assert 3 * CHUNK_SIZE <= hits[1].num_cached <= 4 * CHUNK_SIZE
        assert hits[2].num_cached == 4 * CHUNK_SIZE
    world.references.check(hits, asks, LLAMA)


def test_what_a_first_process_computed_a_second_one_finds(world: World) -> None:
    """Also while the first one lives and goes on."""
    sidecar = world.sidecar()
    ask, answered = Ask(prompt(8, 1000)), Ask(prompt(9, 1000))
    second = world.owner.engine("second")
    with running_engine(world.options()) as engine:
        fill(engine, sidecar, ask)
        second.open(world.options())
        found = second.ask(ask)
        assert found.num_cached == 3 * CHUNK_SIZE
        stored = Growth(sidecar)
        assert second.ask(answered).num_cached == 0
        stored.reaches(whole_chunks(1000))
        back = engine.ask(answered)
        assert back.num_cached == 3 * CHUNK_SIZE, (
            "and what the second one computed the first one finds"
        )
    world.references.check([found, back], [ask, answered], LLAMA)
