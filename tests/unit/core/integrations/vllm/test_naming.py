"""When the names of a request's chunks are made, and made anew."""

from __future__ import annotations

import pytest
from lmcache_core.integrations.vllm.identity import KVIdentity, Roots
from lmcache_core.integrations.vllm.requests import RequestNamer, RequestState

from tests.fixtures.vllm_engine import Feature, Request
from tests.fixtures.vllm_engine.parts import METADATA, request_of
from tests.fixtures.vllm_engine.worlds import CHUNK_SIZE


@pytest.fixture
def roots() -> Roots:
    made = Roots(KVIdentity(METADATA, 1, 1))
    made.use_salt("")
    return made


@pytest.fixture
def namer(roots: Roots) -> RequestNamer:
    return RequestNamer(roots, CHUNK_SIZE)


def hashes_of(namer: RequestNamer, request: Request) -> list[bytes]:
    names = namer.name(RequestState(request, stored=[0]))
    assert names is not None
    return list(names.hashes)


def test_names_grow_with_the_tokens(namer: RequestNamer) -> None:
    request = request_of(2 * CHUNK_SIZE - 1)
    state = RequestState(request, stored=[1])
    assert len(hashes_of(namer, request)) == 1
    namer.name(state)
    state.stored = [1]
    request.append(5)
    names = namer.name(state)
    assert names is not None
    assert names.hashes == hashes_of(namer, request)
    assert len(names.hashes) == 2
    assert state.stored == [1], "what is stored stays stored"


def test_under_other_roots_nothing_is_stored(namer: RequestNamer, roots: Roots) -> None:
    state = RequestState(request_of(), stored=[0])
    before = namer.name(state)
    state.stored = [5]
    roots.use_salt("other")
    after = namer.name(state)
    assert before is not None
    assert after is not None
    assert set(before.hashes).isdisjoint(after.hashes)
    assert state.stored == [0]


def test_a_request_with_embeddings_has_no_names(namer: RequestNamer) -> None:
    request = request_of()
    request.prompt_embeds = object()
    assert namer.name(RequestState(request, stored=[0])) is None


def test_a_session_that_goes_on_drops_a_token(namer: RequestNamer) -> None:
    """vLLM takes the next part of the input in place of the token that it generated last, which
    completed a chunk here.
    """
    request = request_of(2 * CHUNK_SIZE - 1)
    request.resumable = True
    state = RequestState(request, stored=[0])
    namer.name(state)
    request.num_computed_tokens = request.num_tokens
    request.append(5)
    namer.name(state)
    request.go_on([7] * 2 * CHUNK_SIZE, [Feature("cat", 2 * CHUNK_SIZE, 3)])
    names = namer.name(state)
    assert names is not None
    assert names.hashes == hashes_of(namer, request), (
        "of the tokens and contents that are there now"
    )
    without_contents = request_of(2 * CHUNK_SIZE - 1)
    without_contents.num_computed_tokens = without_contents.num_tokens
    without_contents.go_on([7] * 2 * CHUNK_SIZE)
    known = hashes_of(namer, without_contents)
    assert names.hashes[:2] == known[:2]
    assert names.hashes[2] != known[2]


def test_what_a_session_may_drop_has_no_name(namer: RequestNamer) -> None:
    request = request_of(2 * CHUNK_SIZE - 1)
    request.resumable = True
    request.append(5)
    assert len(hashes_of(namer, request)) == 1
