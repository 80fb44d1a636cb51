"""vLLM's cache groups, as far as they can be cached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_core.errors import LayoutError
from lmcache_core.integrations.vllm.groups import (
    cache_groups,
    check_chunk_size,
    check_packing,
    fails_by_block,
)
from lmcache_core.wire.messages import MAX_CHAINS

from tests.fixtures.vllm_engine import FULL, MLA, STATE, Shape, local, window
from tests.fixtures.vllm_engine.shapes import kv_cache_config


def config_of(*groups: Any, block_size: int = 4) -> Any:
    return kv_cache_config(Shape(tuple(groups), block_size=block_size))


def test_an_only_group_has_no_name() -> None:
    (group,) = cache_groups(config_of(FULL))
    assert (group.number, group.index, group.name, group.block_size, group.window) == (
        0,
        0,
        "",
        4,
        None,
    )
    assert group.layers == ("model.layers.0.attn", "model.layers.1.attn")
    assert len(group.specs) == 2


def test_several_groups_are_told_apart_by_number_and_window() -> None:
    groups = cache_groups(config_of(FULL, window(6), window(6)))
    assert [group.name for group in groups] == ["0:full", "1:window6", "2:window6"]
    assert [group.window for group in groups] == [None, 6, 6]


def test_groups_that_vllm_does_not_transfer_are_passed_over() -> None:
    config = config_of(window(6), FULL)
    config.kv_cache_groups[0].enable_kv_transfer = False
    (group,) = cache_groups(config)
    assert (group.number, group.index, group.name) == (0, 1, "")


def test_layers_of_a_group_may_have_specs_of_their_own() -> None:
    config = config_of(FULL)
    spec = config.kv_cache_groups[0].kv_cache_spec
    other = type(spec).__new__(type(spec))
    other.__dict__.update(vars(spec) | {"num_kv_heads": 8})
    by_layer = {"model.layers.0.attn": spec, "model.layers.1.attn": other}
    config.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(kv_cache_specs=by_layer)
    (group,) = cache_groups(config)
    assert [spec.num_kv_heads for spec in group.specs] == [2, 8]


def spec_named(name: str, **facts: Any) -> Any:
    return type(name, (SimpleNamespace,), {})(block_size=4, **facts)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (spec_named("RSWASpec"), "RSWASpec: only full, sliding-window and local"),
        (
            spec_named("SlidingWindowMLASpec", sliding_window=8, bounded_replay=True),
            "bounded_replay",
        ),
        (spec_named("MambaSpec", mamba_cache_mode="none"), "--enable-prefix-caching"),
        (spec_named("MambaSpec", num_speculative_blocks=3), "with draft tokens"),
        (SimpleNamespace(kv_cache_specs={}), "block sizes"),
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
def test_what_is_not_one_kv_per_token_is_refused(spec: Any, complaint: str) -> None:
    config = config_of(FULL)
    config.kv_cache_groups[0].kv_cache_spec = spec
    if not getattr(spec, "kv_cache_specs", True):
        config.kv_cache_groups[0].layer_names = []
    with pytest.raises(LayoutError, match=complaint):
        cache_groups(config)


def test_of_recurrent_state_the_last_block_is_needed() -> None:
    full, state = cache_groups(config_of(FULL, STATE))
    assert (state.name, state.is_state, full.is_state) == ("1:state", True, False)
    assert [state.first_needed_token(num_computed) for num_computed in (0, 4, 8)] == [0, 3, 7]


def test_of_local_attention_the_section_of_the_next_token_is_needed() -> None:
    full, section = cache_groups(config_of(FULL, local(8)))
    assert section.name == "1:local8"
    needed = [section.first_needed_token(num_computed) for num_computed in (7, 8, 15, 16)]
    assert needed == [0, 8, 8, 16]
    assert full.first_needed_token(16) == 0


def test_chunks_end_with_the_blocks_that_hold_state() -> None:
    groups = cache_groups(config_of(FULL, STATE))
    check_chunk_size(groups, 4)
    with pytest.raises(ValueError, match=r'chunk_size=8: .* set "lmcache.chunk_size" to 4'):
        check_chunk_size(groups, 8)


def test_descriptions_tell_what_a_state_is() -> None:
    plain, other = (cache_groups(config_of(STATE))[0] for _ in range(2))
    other.spec.shapes = ((3, 384), (8, 32, 64))
    assert plain.describe() != other.describe()


def test_groups_on_the_host_are_refused() -> None:
    config = config_of(FULL)
    config.kv_cache_groups[0].host_resident = True
    with pytest.raises(LayoutError):
        cache_groups(config)


def test_more_groups_than_a_sidecar_is_asked_about_are_refused() -> None:
    assert len(cache_groups(config_of(*[FULL] * MAX_CHAINS))) == MAX_CHAINS
    with pytest.raises(LayoutError, match="17 cache groups"):
        cache_groups(config_of(*[FULL] * (MAX_CHAINS + 1)))


def test_a_model_without_kv_is_refused() -> None:
    with pytest.raises(LayoutError, match="no KV cache"):
        cache_groups(SimpleNamespace(kv_cache_groups=[]))


def test_chunks_must_be_whole_blocks_of_every_group() -> None:
    groups = cache_groups(config_of(FULL, block_size=16))
    check_chunk_size(groups, 48)
    with pytest.raises(ValueError, match=r'chunk_size=40 .* 16: set "lmcache.chunk_size" to 48'):
        check_chunk_size(groups, 40)


@pytest.mark.parametrize(
    ("num_computed", "num_dropped"), [(0, 0), (5, 0), (6, 1), (7, 2), (40, 35)]
)
def test_a_window_drops_what_the_next_token_does_not_see(
    num_computed: int, num_dropped: int
) -> None:
    """vLLM's own example: with a window of 4 and 7 computed tokens, 0 to 3 are dropped."""
    (group,) = cache_groups(config_of(window(6)))
    assert group.first_needed_token(num_computed) == num_dropped
    (of_vllm,) = cache_groups(config_of(window(4)))
    assert of_vllm.first_needed_token(7) == 4


def test_tokens_in_front_of_a_window_may_be_retained() -> None:
    """vLLM finds them in its prefix cache later, so they are to be loaded as well."""
    config = config_of(window(6))
    config.kv_cache_groups[0].kv_cache_spec.extra_retained_tokens = 3
    (group,) = cache_groups(config)
    assert [group.first_needed_token(count) for count in (8, 9, 40)] == [0, 1, 32]


def test_a_full_group_drops_nothing() -> None:
    (group,) = cache_groups(config_of(MLA))
    assert group.first_needed_token(1000) == 0


def test_descriptions_differ_when_blocks_mean_something_else() -> None:
    def described(config: Any) -> str:
        return "|".join(group.describe() for group in cache_groups(config))

    configs = [
        config_of(FULL),
        config_of(window(6)),
        config_of(MLA),
        config_of(FULL, block_size=8),
        config_of(FULL, window(6)),
    ]
    other_heads = config_of(FULL)
    other_heads.kv_cache_groups[0].kv_cache_spec.num_kv_heads = 4
    texts = [described(config) for config in (*configs, other_heads)]
    assert len(set(texts)) == len(texts)
    assert described(config_of(FULL)) == texts[0]


@pytest.mark.parametrize(
    ("facts", "is_packed"),
    [
        ({"num_head_slots": 2, "state_content_bytes": 64}, True),
        ({"num_head_slots": 2}, True),
        ({"state_content_bytes": 656}, True),
        ({"tokens_per_state": 4}, True),
        ({"page_size_padded": 4096}, False),
    ],
)
def test_a_backend_that_packs_its_kv_is_told_apart_or_refused(
    facts: dict[str, int], is_packed: bool
) -> None:
    """With two KV heads its tensors have the shape of others: K and V would be taken for
    something else.
    """
    plain, packing = config_of(FULL), config_of(FULL)
    vars(packing.kv_cache_groups[0].kv_cache_spec).update(facts)
    before, after = cache_groups(plain), cache_groups(packing)
    assert before[0].describe() != after[0].describe()
    check_packing(after, "blocks")
    check_packing(before, "tokens")
    if is_packed:
        with pytest.raises(
            LayoutError,
            match=r'set "lmcache.layout" to "blocks" and "lmcache.kv_cache_layout" to "LBHNC"',
        ):
            check_packing(after, "tokens")


def test_kv_whose_packing_an_older_release_does_not_tell_is_not_packed() -> None:
    older, later = config_of(FULL), config_of(FULL)
    vars(later.kv_cache_groups[0].kv_cache_spec).update(
        {"num_head_slots": None, "state_content_bytes": None, "tokens_per_state": 1}
    )
    for config in (older, later):
        check_packing(cache_groups(config), "tokens")


@pytest.mark.parametrize("fact", ["model_version", "cache_dtype_str", "non_causal", "of_tomorrow"])
def test_each_fact_of_a_group_counts(fact: str) -> None:
    plain, other = config_of(FULL), config_of(FULL)
    vars(other.kv_cache_groups[0].kv_cache_spec)[fact] = "v4"
    assert cache_groups(plain)[0].describe() != cache_groups(other)[0].describe()


@pytest.mark.parametrize(
    ("groups", "by_block"),
    [((FULL,), True), ((MLA,), True), ((window(6),), False), ((FULL, window(6)), False)],
)
def test_only_one_full_group_fails_by_block(groups: tuple[Any, ...], by_block: bool) -> None:
    assert fails_by_block(cache_groups(config_of(*groups))) is by_block
