"""Names of a request's chunks are those that the engine's own token database gives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lmcache_core.integrations.vllm.requests import ChunkNames, spans_of
from lmcache_core.token_database import ChunkedTokenDatabase, MultimodalSpan
from lmcache_core.token_database.hashing import identity_root

from tests.fixtures.kv import CHUNK_SIZE, make_config, make_metadata
from tests.fixtures.vllm_engine import Feature
from tests.fixtures.vllm_engine.worlds import prompt

SPANS = [MultimodalSpan(b"cat", 10, 20), MultimodalSpan(b"dog", 50, 3)]


def of_database(tokens: list[int], spans: list[MultimodalSpan]) -> list[str]:
    database = ChunkedTokenDatabase(make_config(salt="salt"), make_metadata())
    return [
        key.chunk_hash
        for start, end, key in database.process_tokens(torch.tensor(tokens), None, spans)
        if end - start == CHUNK_SIZE
    ]


@pytest.mark.parametrize("spans", [[], SPANS], ids=["text", "contents"])
@pytest.mark.parametrize(
    "steps", [(70,), (70, 71, 79, 80, 81), (5, 15, 16, 17, 64, 128), (1, 1, 33)]
)
def test_names_are_those_of_the_token_database(
    spans: list[MultimodalSpan], steps: tuple[int, ...]
) -> None:
    """However the tokens become known: all at once, or one by one."""
    tokens = prompt(1, 128)
    names = ChunkNames(identity_root(make_metadata(), "salt"), CHUNK_SIZE, spans)
    for num_known in steps:
        assert [digest.hex() for digest in names.extend(tokens[:num_known])] == of_database(
            tokens[:num_known], spans
        )


def test_a_content_is_told_by_its_hash_and_place() -> None:
    request = SimpleNamespace(mm_features=[Feature("cat", 10, 20), Feature("dog", 50, 3)])
    assert spans_of(request) == SPANS


@pytest.mark.parametrize("features", [None, []])
def test_text_has_no_contents(features: object) -> None:
    assert spans_of(SimpleNamespace(mm_features=features)) == []
    assert spans_of(SimpleNamespace()) == []


def test_a_content_without_a_hash_has_no_name() -> None:
    assert spans_of(SimpleNamespace(mm_features=[Feature("cat", 0, 4), Feature("", 10, 4)])) is None


def test_a_content_is_told_by_what_it_becomes_too() -> None:
    request = SimpleNamespace(mm_features=[Feature("cat", 10, 20)])
    assert spans_of(request, "dark ") == [MultimodalSpan(b"dark cat", 10, 20)]


def test_contents_that_are_only_counted_have_no_names() -> None:
    assert (
        spans_of(SimpleNamespace(mm_features=[Feature("renderer0-mm-1-image-0", 0, 4)]), None)
        is None
    )
    assert spans_of(SimpleNamespace(mm_features=[]), None) == [], "a request of text has"
