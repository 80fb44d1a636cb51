"""Whatever tenants, users and adapters call themselves, no two of them get the same root of
chunk names.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lmcache_core.integrations.vllm.identity import KVIdentity
from lmcache_core.integrations.vllm.requests import RequestNamer

from tests.fixtures.vllm_engine import Adapter
from tests.fixtures.vllm_engine.parts import METADATA
from tests.fixtures.vllm_engine.worlds import CHUNK_SIZE, make_adapter

Names = tuple[str, str, str, str]
"""The tenant's salt, `cache_salt`, an adapter's name ("" for none) and its weights."""

WORDS = st.text("ab12:;@-\u00e9", max_size=12)
NAMES = st.tuples(WORDS, WORDS, WORDS, st.sampled_from(["one", "two"]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters with these weights."""
    return {
        weights: str(make_adapter(tmp_path_factory.mktemp(weights), weights))
        for weights in ("one", "two")
    }


def root_of(names: Names, folders: dict[str, str]) -> bytes | None:
    tenant, cache_salt, adapter, weights = names
    namer = RequestNamer(KVIdentity(METADATA, 1, 1), CHUNK_SIZE)
    namer.use_salt(tenant)
    request: Any = SimpleNamespace(
        cache_salt=cache_salt or None,
        lora_request=Adapter(adapter, folders[weights]) if adapter else None,
    )
    return namer.root_of(request)


def meaning(names: Names) -> tuple[str, ...]:
    """Weights without an adapter mean nothing."""
    return names if names[2] else names[:3]


@settings(max_examples=300, deadline=None)
@given(one=NAMES, other=NAMES)
@example(one=("a", "b", "", "one"), other=("1:a;1:b;", "", "", "one"))
@example(one=("", "1:a", "", "one"), other=("0:;3:1:a;", "", "", "one"))
@example(one=("", "", "l", "one"), other=("", "", "l@files-", "one"))
@example(one=("", "\ud800", "", "one"), other=("", "\udfff", "", "one"))
def test_roots_are_the_same_for_the_same_names_only(
    folders: dict[str, str], one: Names, other: Names
) -> None:
    roots = root_of(one, folders), root_of(other, folders)
    assert None not in roots
    assert (roots[0] == roots[1]) == (meaning(one) == meaning(other))
    assert root_of(one, folders) == roots[0]


@settings(max_examples=100, deadline=None)
@given(WORDS, WORDS)
def test_a_reset_keeps_salts_apart(one: str, other: str) -> None:
    namer = RequestNamer(KVIdentity(METADATA, 1, 1), CHUNK_SIZE)
    namer.use_salt("")
    before = [namer.root_of(SimpleNamespace(cache_salt=salt)) for salt in (one, other)]
    namer.begin_epoch()
    after = [namer.root_of(SimpleNamespace(cache_salt=salt)) for salt in (one, other)]
    assert not set(before) & set(after)
    assert (after[0] == after[1]) == (one == other)
