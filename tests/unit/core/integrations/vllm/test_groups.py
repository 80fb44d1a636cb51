"""vLLM's cache groups: what they mean, and which of them cannot be cached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_core.errors import LayoutError
from lmcache_core.integrations.vllm.groups import (
    CacheGroup,
    cache_groups,
    check_chunk_size,
    check_packing,
    fails_by_block,
)
from lmcache_core.wire.messages import MAX_CHAINS

from tests.fixtures.vllm_engine import FULL, MLA, STATE, GroupShape, Shape, local, window
from tests.fixtures.vllm_engine.shapes import kv_cache_config


def config_of(*groups: GroupShape, block_size: int = 4, **facts: Any) -> Any:
    """vLLM's configuration of these groups, with these facts about the first one's KV."""
    config = kv_cache_config(Shape(tuple(groups), block_size=block_size))
    vars(config.kv_cache_groups[0].kv_cache_spec).update(facts)
    return config


def group_of(group: GroupShape, **facts: Any) -> CacheGroup:
    (only,) = cache_groups(config_of(group, **facts))
    return only


def test_several_groups_are_named_by_number_and_window() -> None:
    groups = cache_groups(config_of(FULL, window(6), local(8), STATE))
    assert [group.name for group in groups] == ["0:full", "1:window6", "2:local8", "3:state"]
    assert [group.window for group in groups[:3]] == [None, 6, 8]
    assert [group.is_state for group in groups] == [False, False, False, True]


def test_group_that_vllm_does_not_transfer_is_skipped() -> None:
    config = config_of(window(6), FULL)
    config.kv_cache_groups[0].enable_kv_transfer = False
    (group,) = cache_groups(config)
    assert (group.number, group.index, group.name) == (0, 1, "")


def spec_named(name: str, **facts: Any) -> Any:
    return type(name, (SimpleNamespace,), {})(block_size=4, **facts)


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (spec_named("RSWASpec"), "RSWASpec: only full, sliding-window and local"),
        (
            spec_named("SlidingWindowMLASpec", sliding_window=8, bounded_replay=True),
            "bounded_replay",
        ),
        (spec_named("MambaSpec", mamba_cache_mode="none"), "--enable-prefix-caching"),
        (
            SimpleNamespace(
                kv_cache_specs={
                    "model.layers.0.attn": spec_named("SlidingWindowSpec", sliding_window=6),
                    "model.layers.1.attn": spec_named("SlidingWindowSpec", sliding_window=8),
                }
            ),
            "must be the same",
        ),
    ],
)
def test_group_without_one_kv_per_token_is_refused(spec: Any, error: str) -> None:
    config = config_of(FULL)
    config.kv_cache_groups[0].kv_cache_spec = spec
    with pytest.raises(LayoutError, match=error):
        cache_groups(config)


def test_group_on_the_host_is_refused() -> None:
    config = config_of(FULL)
    config.kv_cache_groups[0].host_resident = True
    with pytest.raises(LayoutError):
        cache_groups(config)


def test_number_of_groups_has_bounds() -> None:
    assert len(cache_groups(config_of(*[FULL] * MAX_CHAINS))) == MAX_CHAINS
    with pytest.raises(LayoutError, match="17 cache groups"):
        cache_groups(config_of(*[FULL] * (MAX_CHAINS + 1)))
    with pytest.raises(LayoutError, match="no KV cache"):
        cache_groups(SimpleNamespace(kv_cache_groups=[]))


@pytest.mark.parametrize(
    ("groups", "block_size", "good", "bad", "error"),
    [
        ([FULL], 16, 48, 40, r'chunk_size=40 .* 16: set "lmcache.chunk_size" to 48'),
        ([FULL, STATE], 4, 4, 8, r'chunk_size=8: .* set "lmcache.chunk_size" to 4'),
    ],
    ids=["whole blocks", "blocks end with their state"],
)
def test_chunk_size_fits_the_blocks(
    groups: list[GroupShape], block_size: int, good: int, bad: int, error: str
) -> None:
    found = cache_groups(config_of(*groups, block_size=block_size))
    check_chunk_size(found, good)
    with pytest.raises(ValueError, match=error):
        check_chunk_size(found, bad)


@pytest.mark.parametrize(
    ("group", "retained", "first_needed"),
    [
        (FULL, 0, {1000: 0}),
        (window(6), 0, {0: 0, 5: 0, 6: 1, 7: 2, 40: 35}),
        # vLLM's own example: with a window of 4 and 7 computed tokens, 0 to 3 are dropped.
        (window(4), 0, {7: 4}),
        # vLLM finds these in its prefix cache later, so they are loaded, too.
        (window(6), 3, {8: 0, 9: 1, 40: 32}),
        (local(8), 0, {7: 0, 8: 8, 15: 8, 16: 16}),
        (STATE, 0, {0: 0, 4: 3, 8: 7}),
    ],
    ids=["full", "window", "vLLM's example", "retained", "local", "state"],
)
def test_first_token_that_the_next_one_needs(
    group: GroupShape, retained: int, first_needed: dict[int, int]
) -> None:
    found = group_of(group, extra_retained_tokens=retained)
    assert {count: found.first_needed_token(count) for count in first_needed} == first_needed


def test_descriptions_differ_where_blocks_mean_something_else() -> None:
    def described(config: Any) -> str:
        return "|".join(group.describe() for group in cache_groups(config))

    texts = [
        described(config)
        for config in (
            config_of(FULL),
            config_of(window(6)),
            config_of(MLA),
            config_of(FULL, block_size=8),
            config_of(FULL, window(6)),
            config_of(FULL, num_kv_heads=4),
            config_of(STATE),
            config_of(STATE, shapes=((3, 384), (8, 32, 64))),
        )
    ]
    assert len(set(texts)) == len(texts)
    assert described(config_of(FULL)) == texts[0]


@pytest.mark.parametrize("fact", ["model_version", "cache_dtype_str", "of_tomorrow"])
def test_each_fact_of_a_group_counts(fact: str) -> None:
    assert group_of(FULL).describe() != group_of(FULL, **{fact: "v4"}).describe()


@pytest.mark.parametrize(
    ("facts", "is_packed"),
    [
        ({"num_head_slots": 2}, True),
        ({"state_content_bytes": 656}, True),
        ({"tokens_per_state": 4}, True),
        ({"page_size_padded": 4096}, False),
        ({"num_head_slots": None, "state_content_bytes": None, "tokens_per_state": 1}, False),
    ],
)
def test_packed_kv_is_not_cut_by_token(facts: dict[str, int | None], is_packed: bool) -> None:
    """Its tensors may have the shape of others: K and V would be taken for something else."""
    group = group_of(FULL, **facts)
    check_packing([group], "blocks")
    if not is_packed:
        check_packing([group], "tokens")
        return
    assert group.describe() != group_of(FULL).describe()
    fix = r'set "lmcache.layout" to "blocks" and "lmcache.kv_cache_layout" to "LBHNC"'
    with pytest.raises(LayoutError, match=fix):
        check_packing([group], "tokens")


@pytest.mark.parametrize(
    ("groups", "by_block"),
    [([FULL], True), ([MLA], True), ([window(6)], False), ([FULL, window(6)], False)],
)
def test_only_a_single_full_group_fails_by_block(groups: list[GroupShape], by_block: bool) -> None:
    assert fails_by_block(cache_groups(config_of(*groups))) is by_block
