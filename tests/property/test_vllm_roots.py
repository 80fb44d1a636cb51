"""Whatever tenants, users and adapters call themselves, no two of them get the same root of chunk names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from lmcache_core.integrations.vllm.identity import KVIdentity, Roots

from tests.fixtures.vllm_engine import Adapter
from tests.fixtures.vllm_engine.parts import METADATA

Names = tuple[str, str, str, str]
"""The tenant's salt, `cache_salt`, an adapter's name ("" for none) and its path."""

WORDS = st.text("ab12:;@-\u00e9", max_size=12)
NAMES = st.tuples(WORDS, WORDS, WORDS, st.sampled_from(["org/x", "org/x@path-org/y", "org/y"]))


def root_of(names: Names) -> bytes | None:
    tenant, cache_salt, adapter, path = names
    roots = Roots(KVIdentity(METADATA, 1, 1))
    roots.use_salt(tenant)
    request: Any = SimpleNamespace(cache_salt=cache_salt or None, lora_request=Adapter(adapter, path) if adapter else None)
    return roots.root_of(request)


def meaning(names: Names) -> tuple[str, ...]:
    """A path without an adapter means nothing."""
    return names if names[2] else names[:3]


@settings(max_examples=300, deadline=None)
@given(NAMES, NAMES)
@example(("a", "b", "", "org/x"), ("1:a;1:b;", "", "", "org/x"))
@example(("", "1:a", "", "org/x"), ("0:;3:1:a;", "", "", "org/x"))
@example(("", "", "l", "org/x@path-org/y"), ("", "", "l@path-org/x", "org/y"))
@example(("", "\ud800", "", "org/x"), ("", "\udfff", "", "org/x"))
def test_roots_are_the_same_for_the_same_names_only(one: Names, other: Names) -> None:
    roots = root_of(one), root_of(other)
    assert None not in roots
    assert (roots[0] == roots[1]) == (meaning(one) == meaning(other))
    assert root_of(one) == roots[0]


@settings(max_examples=100, deadline=None)
@given(WORDS, WORDS)
def test_a_reset_keeps_salts_apart(one: str, other: str) -> None:
    roots = Roots(KVIdentity(METADATA, 1, 1))
    roots.use_salt("")
    before = [roots.root_of(SimpleNamespace(cache_salt=salt)) for salt in (one, other)]
    roots.begin_epoch()
    after = [roots.root_of(SimpleNamespace(cache_salt=salt)) for salt in (one, other)]
    assert not set(before) & set(after)
    assert (after[0] == after[1]) == (one == other)
