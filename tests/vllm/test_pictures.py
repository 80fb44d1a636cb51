"""Pictures among the words: KV is shared by prompts with the same pictures, and with other ones
only up to the first that differs.
"""

from __future__ import annotations

import pytest
from lmcache_core.integrations.vllm import requests

from tests.vllm.engines import CHUNK_SIZE, Ask, running_engine
from tests.vllm.models import PLACEHOLDER_ID, SEEING
from tests.vllm.pictures import PICTURE_TOKENS
from tests.vllm.references import distance, prompt
from tests.vllm.sidecars import Growth, await_calm
from tests.vllm.worlds import World

HASHER = {"mm_hasher_algorithm": "sha256"}
"""How vLLM names a picture; its usual hash is of a package that need not be there."""
BEFORE, AFTER = 300, 350
"""Words before and after a picture, which then begins in the second chunk and ends in the third."""


def seen(*pictures: int, before: int = BEFORE, after: int = AFTER) -> Ask:
    """A prompt of words, the first picture, words, the second one, and so on."""
    tokens = prompt(300, before)
    for number in range(len(pictures)):
        tokens += (PLACEHOLDER_ID, *prompt(301 + number, after))
    return Ask(tokens, pictures=pictures)


def chunks(num_tokens: int) -> int:
    """Tokens in the whole chunks of so many."""
    return num_tokens // CHUNK_SIZE * CHUNK_SIZE


def test_other_pictures_share_only_what_stands_before_them(world: World) -> None:
    """And a hit that ends within a picture is one: the rest is computed from the picture."""
    sidecar = world.sidecar()
    short, red, blue = seen(1, after=20), seen(1), seen(2)
    whole = chunks(BEFORE + PICTURE_TOKENS + AFTER)
    assert BEFORE < 2 * CHUNK_SIZE < BEFORE + PICTURE_TOKENS < whole == 3 * CHUNK_SIZE
    asks, hits = [short, red, blue, red, blue], [0, 2 * CHUNK_SIZE, chunks(BEFORE), whole, whole]
    with running_engine(world.options(SEEING, **HASHER)) as engine:
        stored, answers = Growth(sidecar), []
        for ask, num_cached, num_stored in zip(asks, hits, [2, 3, 5, 5, 5], strict=True):
            engine.reset()
            answers.append(engine.ask(ask))
            assert answers[-1].num_cached == num_cached
            stored.reaches(num_stored)
        engine.reset()
        both = engine.generate([blue, red])
        assert [answer.num_cached for answer in both] == [whole, whole]
        assert stored.num_chunks == 5
    assert distance(answers[-1], answers[-2]) > 0.01, (
        "the picture changes nothing: the test tests nothing"
    )
    world.references.check([*answers, *both], [*asks, blue, red], SEEING, **HASHER)


def test_several_pictures_and_pictures_at_the_edges_of_chunks(world: World) -> None:
    """Chunks that end where a picture begins or ends, and another second picture behind the same
    first one; computed in pieces.
    """
    sidecar = world.sidecar()
    begins, ends = CHUNK_SIZE, 2 * CHUNK_SIZE - PICTURE_TOKENS
    second = BEFORE + PICTURE_TOKENS + AFTER
    pairs = [
        (seen(1, before=begins), seen(2, before=begins), begins),
        (seen(3, before=ends), seen(4, before=ends), 0),
        (seen(5, 6), seen(5, 8), chunks(second)),
        (seen(7, 7), seen(7, 9), chunks(second)),
    ]
    with running_engine(world.options(SEEING, max_num_batched_tokens=200, **HASHER)) as engine:
        stored, num_stored, answers = Growth(sidecar), 0, []
        for ask, other, num_shared in pairs:
            for one in (ask, other):
                engine.reset()
                answers.append(engine.ask(one))
                num_tokens = len(one.tokens) + len(one.pictures) * (PICTURE_TOKENS - 1)
                num_stored += (num_tokens - answers[-1].num_cached) // CHUNK_SIZE
                stored.reaches(num_stored)
            assert answers[-1].num_cached == num_shared
    world.references.check(
        answers, [one for ask, other, _ in pairs for one in (ask, other)], SEEING, **HASHER
    )


def test_pictures_that_no_name_tells_apart(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: were pictures left out of the names of chunks, the answer to one would be
    computed with the KV of another.
    """
    sidecar = world.sidecar()
    monkeypatch.setattr(requests, "spans_of", lambda request, contents: [])
    with running_engine(world.options(SEEING, **HASHER)) as engine:
        stored = Growth(sidecar)
        engine.ask(seen(1))
        stored.reaches(3)
        engine.reset()
        wrong = engine.ask(seen(2))
    assert wrong.num_cached == 3 * CHUNK_SIZE
    (right,) = world.references.answers([seen(2)], SEEING, **HASHER)
    assert wrong.tokens != right.tokens
    assert distance(wrong, right) > 0.01


@pytest.mark.smoke
def test_pictures_that_vllm_only_counts(world: World) -> None:
    """Without a cache of its own for either prompts or pictures, vLLM calls the first picture of
    every process the same.
    """
    world.sidecar()
    uncached = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    answers = []
    for ask in (seen(1), seen(2)):
        with running_engine(world.options(SEEING, **uncached, **HASHER)) as engine:
            answers.append(engine.ask(ask))
            words = Ask(prompt(310, 600))
            found = [engine.ask(words).num_cached for _ in range(2)]
    assert [answer.num_cached for answer in answers] == [0, 0]
    assert found == [2 * CHUNK_SIZE] * 2, "words alone are found"
    world.references.check(answers, [seen(1), seen(2)], SEEING, **HASHER)


def test_pictures_that_are_prepared_otherwise(world: World) -> None:
    """An engine that makes other numbers of the same pictures shares the words before them, and
    nothing else.
    """
    sidecar = world.sidecar()
    ask, darker = seen(1), {"mm_processor_kwargs": {"rescale_factor": 1 / 1000}}
    answers = []
    for options in ({}, darker):
        with running_engine(world.options(SEEING, **options, **HASHER)) as engine:
            answers.append(engine.ask(ask))
            await_calm(sidecar)
    assert [answer.num_cached for answer in answers] == [0, chunks(BEFORE)]
    assert distance(*answers) > 0.01, "the option changes nothing: the test tests nothing"
    world.references.check(answers[:1], [ask], SEEING, **HASHER)
    world.references.check(answers[1:], [ask], SEEING, **darker, **HASHER)
