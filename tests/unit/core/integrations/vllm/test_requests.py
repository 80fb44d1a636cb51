"""A request on the scheduler's side: the names of its chunks, and which of them are stored from or
loaded into its blocks.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lmcache_core.integrations.vllm.identity import KVIdentity
from lmcache_core.integrations.vllm.requests import ChunkNames, RequestNamer, RequestState, spans_of
from lmcache_core.token_database import ChunkedTokenDatabase, MultimodalSpan
from lmcache_core.token_database.hashing import identity_root

from tests.fixtures import kv
from tests.fixtures.vllm_engine import FULL, Feature, Request, Shape, window
from tests.fixtures.vllm_engine.parts import METADATA, groups_of, request_of
from tests.fixtures.vllm_engine.worlds import CHUNK_SIZE, prompt

SPANS = [MultimodalSpan(b"cat", 10, 20), MultimodalSpan(b"dog", 50, 3)]
FULL_ONLY = groups_of(Shape())


@pytest.mark.parametrize("spans", [[], SPANS], ids=["text", "contents"])
@pytest.mark.parametrize("steps", [(70, 71, 79, 80, 81), (5, 15, 16, 17, 64, 128), (1, 1, 33)])
def test_names_are_those_of_the_token_database(
    spans: list[MultimodalSpan], steps: tuple[int, ...]
) -> None:
    """However the tokens become known: all at once, or one by one."""
    tokens = prompt(1, 128)
    database = ChunkedTokenDatabase(kv.make_config(salt="salt"), kv.make_metadata())
    names = ChunkNames(identity_root(kv.make_metadata(), "salt"), kv.CHUNK_SIZE, spans)
    for num_known in steps:
        names.extend(tokens[:num_known])
        expected = "".join(
            key.chunk_hash
            for start, end, key in database.process_tokens(
                torch.tensor(tokens[:num_known]), None, spans
            )
            if end - start == kv.CHUNK_SIZE
        )
        assert names.hashes.hex() == expected
        assert names.num_chunks == num_known // kv.CHUNK_SIZE


@pytest.mark.parametrize(
    ("features", "contents", "spans"),
    [
        (None, "", []),
        ([], None, []),
        ([Feature("cat", 10, 20), Feature("dog", 50, 3)], "", SPANS),
        ([Feature("cat", 10, 20)], "dark ", [MultimodalSpan(b"dark cat", 10, 20)]),
        ([Feature("cat", 0, 4), Feature("", 10, 4)], "", None),
        ([Feature("renderer0-mm-1-image-0", 0, 4)], None, None),
    ],
    ids=["text", "text where contents are counted", "contents", "processed", "no hash", "counted"],
)
def test_contents_are_named_by_hash_place_and_processing(
    features: list[Feature] | None, contents: str | None, spans: list[MultimodalSpan] | None
) -> None:
    assert spans_of(SimpleNamespace(mm_features=features), contents) == spans


@pytest.fixture
def namer() -> RequestNamer:
    made = RequestNamer(KVIdentity(METADATA, 1, 1), CHUNK_SIZE)
    made.use_salt("")
    return made


def state_of_request(request: Request) -> RequestState:
    return RequestState(request, FULL_ONLY, CHUNK_SIZE)


def hashes_of(namer: RequestNamer, request: Request) -> bytes:
    names = namer.name(state_of_request(request))
    assert names is not None
    return names.hashes


def test_chunks_are_stored_again_under_another_salt(namer: RequestNamer) -> None:
    state = state_of_request(request_of())
    before = namer.name(state)
    state.stored = [5]
    namer.use_salt("other")
    after = namer.name(state)
    assert before is not None
    assert after is not None
    assert before.hashes[:32] != after.hashes[:32]
    assert state.stored == [0]


def test_embeddings_are_named_by_chunk_dtype_and_place(namer: RequestNamer) -> None:
    embeds = torch.arange(2 * CHUNK_SIZE * 3, dtype=torch.bfloat16).reshape(-1, 3)

    def hashes_of(embeds: torch.Tensor, are_ids: list[bool] | None = None) -> list[bytes]:
        request = request_of(len(embeds), 0)
        request.prompt_embeds, request.prompt_is_token_ids = embeds, are_ids
        names = namer.name(state_of_request(request))
        assert names is not None
        return [names.hashes[:32], names.hashes[32:]]

    first, second = hashes_of(embeds)
    assert hashes_of(embeds.clone()) == [first, second]
    other = embeds.clone()
    other[CHUNK_SIZE, 0] += 1
    assert hashes_of(other)[0] == first
    assert hashes_of(other)[1] != second
    assert hashes_of(embeds.float())[0] != first
    assert hashes_of(embeds, [True] + [False] * (len(embeds) - 1))[0] != first
    assert hashes_of(embeds.roll(1, 0))[0] != first


def test_embeddings_with_images_have_no_names(namer: RequestNamer) -> None:
    request = request_of()
    request.prompt_embeds = torch.zeros(len(request.all_token_ids), 3)
    request.mm_features = [Feature("image", 2, 5)]
    assert namer.name(state_of_request(request)) is None


def test_session_that_continues_drops_a_token(namer: RequestNamer) -> None:
    """vLLM replaces the last token that it generated, which completed a chunk here, by the next
    part of the input.
    """
    request = request_of(2 * CHUNK_SIZE - 1)
    request.resumable = True
    state = state_of_request(request)
    namer.name(state)
    request.num_computed_tokens = request.num_tokens
    request.append(5)
    assert len(hashes_of(namer, request)) == 32, "what may be dropped has no name"
    namer.name(state)
    request.go_on([7] * 2 * CHUNK_SIZE, [Feature("cat", 2 * CHUNK_SIZE, 3)])
    names = namer.name(state)
    assert names is not None
    assert names.hashes == hashes_of(namer, request), "of the tokens and contents of now"
    without_contents = request_of(2 * CHUNK_SIZE - 1)
    without_contents.num_computed_tokens = without_contents.num_tokens
    without_contents.go_on([7] * 2 * CHUNK_SIZE)
    known = hashes_of(namer, without_contents)
    assert names.hashes[:64] == known[:64]
    assert names.hashes[64:96] != known[64:96]


def test_blocks_of_groups_that_are_not_cached_are_ignored() -> None:
    (group,) = groups_of(Shape())
    state = RequestState(request_of(), [replace(group, index=1)], CHUNK_SIZE)
    state.set_blocks([[9, 9], [1, 2]])
    assert state.tables == [[1, 2]]


def test_only_the_window_of_the_next_token_is_loaded() -> None:
    """Other chunks of the group may not have been stored."""
    names = ChunkNames(b"root", CHUNK_SIZE)
    names.extend(prompt(1, 43))
    groups = groups_of(Shape((FULL, window(6))))
    state = RequestState(request_of(), groups, CHUNK_SIZE, names)
    state.set_blocks([range(1, 12), range(21, 32)])
    full, windowed = state.load_runs(0, 40)
    assert (full.first, full.num_chunks) == (0, 5)
    # the next token sees 35 to 40
    assert (windowed.first, windowed.hashes) == (4, names.hashes[128:160])
    assert windowed.block_ids == (29, 30)
