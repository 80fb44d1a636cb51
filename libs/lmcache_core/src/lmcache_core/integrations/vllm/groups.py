"""vLLM's cache groups (layers that share a block table) and which of them can be cached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_core.errors import LayoutError
from lmcache_core.integrations.vllm.kv_settings import VLLM_SETTINGS
from lmcache_core.integrations.vllm.options import TOKENS

NULL_BLOCK = 0
"""vLLM's placeholder for a block that a request no longer has, or never had."""
LARGEST_PAGE = 4
"""No layer of a group has pages more than this many times as large as those of its first layer."""
MAX_GROUPS = 16
"""Limit on the groups in one question to the sidecar."""
FULL_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
WINDOW_SPECS = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
LOCAL_SPECS = frozenset({"ChunkedLocalAttentionSpec"})
STATE_SPECS = frozenset({"MambaSpec"})
STATE_WINDOW = 2
"""vLLM keeps the blocks of recurrent state as those of a window of two tokens: the next token needs
the state after the last one.
"""
ALIGNED = "align"
"""vLLM's `mamba_cache_mode` in which a block holds the state after its last token."""
_UNPACKED = {"num_head_slots": None, "state_content_bytes": None, "tokens_per_state": 1}
"""vLLM's descriptions of KV whose cells hold K and V of one head and one token."""


@dataclass(frozen=True)
class CacheGroup:
    """One group.

    Attributes:
        number: Its index among the groups that are cached.
        index: Its index in vLLM.
        name: Its part of a chunk's key; "" if it is the only one.
        block_size: Tokens in a block.
        window: Tokens that its layers attend to, the current one included; None: all. Of local
            attention, tokens of a section, which attend to that section alone.
        spec: vLLM's description of the first layer, the only one in the scheduler's process.
        specs: In a worker, vLLM's description of each of these layers.
        retained: Tokens before the window whose KV vLLM keeps (it may recompute them for draft
            models).
        is_state: A block holds the state after all tokens up to its last one, instead of the KV of
            its tokens.
    """

    number: int
    index: int
    name: str
    block_size: int
    window: int | None
    layers: tuple[str, ...]
    spec: Any
    specs: tuple[Any, ...]
    retained: int = 0
    is_local: bool = False
    is_state: bool = False

    def first_needed_token(self, num_computed: int) -> int:
        """Return the first token whose KV vLLM still needs when `num_computed` are computed: the
        next token attends to it, or it is retained. vLLM drops the blocks before it when the next
        step begins.
        """
        if self.window is None:
            return 0
        if self.is_local:
            return num_computed // self.window * self.window
        return max(0, num_computed - self.window + 1 - self.retained)

    def describe(self) -> str:
        """Return text that differs if a block of this group means something else, and is the same
        in all processes of an engine.

        What only a worker knows, such as how its other layers differ from the first, is in the
        records of its chunks (`memory_of`).
        """
        facts = f"block={self.block_size};window={self.window};layers={len(self.layers)}"
        return f"{self.name!r}:{facts};{described(self.spec)}"


def cache_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """Return the groups of a model.

    Raises:
        LayoutError: A group is of another kind, or there are more than `MAX_GROUPS`: such a model
            is not cached.
    """
    wanted = [
        (i, group)
        for i, group in enumerate(kv_cache_config.kv_cache_groups)
        if getattr(group, "enable_kv_transfer", True)
    ]
    if not wanted:
        raise LayoutError("the model has no KV cache")
    if len(wanted) > MAX_GROUPS:
        raise LayoutError(
            f"the model has {len(wanted)} cache groups; at most {MAX_GROUPS} can be cached"
        )
    return tuple(
        _cache_group(number, index, group, is_only=len(wanted) == 1)
        for number, (index, group) in enumerate(wanted)
    )


def largest_chunk_bytes(groups: Sequence[CacheGroup], chunk_size: int) -> int:
    """Return a size that no chunk of these groups exceeds; 0 if vLLM does not say how large its
    pages are.

    It is generous: the scheduler knows the page of each group's first layer alone.
    """
    return max(
        len(group.layers)
        * (1 if group.is_state else max(1, chunk_size // group.block_size))
        * max(int(getattr(spec, "page_size_bytes", 0)) for spec in (group.spec, *group.specs))
        * LARGEST_PAGE
        for group in groups
    )


def _cache_group(number: int, index: int, group: Any, is_only: bool) -> CacheGroup:
    spec, layers = group.kv_cache_spec, tuple(group.layer_names)
    # A group whose layers differ in shape has a description for each. The scheduler gets the first
    # one, whatever its layers are named.
    by_layer = getattr(spec, "kv_cache_specs", None)
    specs = (spec,) * len(layers) if by_layer is None else tuple(by_layer[name] for name in layers)
    kinds = {type(spec).__name__ for spec in specs}
    known = FULL_SPECS | WINDOW_SPECS | LOCAL_SPECS | STATE_SPECS
    if not kinds <= known or getattr(group, "host_resident", False):
        raise LayoutError(
            f"cache group {index} is of {', '.join(sorted(kinds))}: only full, sliding-window and"
            " local attention and recurrent state can be cached"
        )
    if any(getattr(spec, "bounded_replay", False) for spec in specs):
        raise LayoutError(
            f"cache group {index} has windows that vLLM computes again after each hit"
            " (bounded_replay)"
        )
    is_local, is_state = (bool(kinds) and kinds <= some for some in (LOCAL_SPECS, STATE_SPECS))
    modes = {getattr(spec, "mamba_cache_mode", ALIGNED) for spec in specs}
    if is_state and modes != {ALIGNED}:
        raise LayoutError(
            f"cache group {index} holds recurrent state, which vLLM keeps at the end of a block"
            " only with its prefix cache: start it with --enable-prefix-caching"
        )
    windows = {_window_of(spec) for spec in specs}
    sizes = {spec.block_size for spec in specs}
    if len(windows) != 1 or len(sizes) != 1:
        raise LayoutError(
            f"cache group {index} has layers of windows {windows} and block sizes {sizes}: they"
            " must be the same"
        )
    (window,), (block_size,) = windows, sizes
    kind = "state" if is_state else "full" if window is None else f"window{window}"
    kind = f"local{window}" if is_local else kind
    name = "" if is_only else f"{index}:{kind}"
    retained = max(getattr(spec, "extra_retained_tokens", 0) for spec in specs)
    first = spec if by_layer is None else next(iter(by_layer.values()))
    return CacheGroup(
        *(number, index, name, block_size, window, layers),
        *(first, specs, retained, is_local, is_state),
    )


def _window_of(spec: Any) -> int | None:
    kind = type(spec).__name__
    if kind in STATE_SPECS:
        return STATE_WINDOW
    if kind in LOCAL_SPECS:
        return int(spec.attention_chunk_size)
    return spec.sliding_window if kind in WINDOW_SPECS else None


def check_chunk_size(groups: Iterable[CacheGroup], chunk_size: int) -> None:
    """Reject a chunk size that is not a multiple of the block size, or, with recurrent state, not
    the block size.

    Raises:
        ValueError: Some group's blocks do not fit.
    """
    for group in groups:
        if group.is_state and chunk_size != group.block_size:
            raise ValueError(
                f"chunk_size={chunk_size}: the model has recurrent state, which vLLM keeps at the"
                f" end of its blocks of {group.block_size} tokens: set"
                f' "lmcache.chunk_size" to {group.block_size} in kv_connector_extra_config'
            )
        if chunk_size % group.block_size:
            fitting = -(-chunk_size // group.block_size) * group.block_size
            raise ValueError(
                f"chunk_size={chunk_size} is not a multiple of vLLM's block size"
                f' {group.block_size}: set "lmcache.chunk_size" to {fitting} in'
                " kv_connector_extra_config, or change --block-size"
            )


def check_packing(groups: Iterable[CacheGroup], layout: str) -> None:
    """Reject packed KV if chunks must be cut by token: its shape does not tell what is where.

    Raises:
        LayoutError: A layer has such KV.
    """
    if layout != TOKENS:
        return
    tokens = [group for group in groups if not group.is_state]
    for spec in (spec for group in tokens for spec in (group.spec, *group.specs)):
        packing = {name: getattr(spec, name, usual) for name, usual in _UNPACKED.items()}
        if packing != _UNPACKED:
            told = ", ".join(f"{name}={value}" for name, value in packing.items())
            raise LayoutError(
                f"the attention backend packs its KV ({told}), which cannot be cut by token: set"
                ' "lmcache.layout" to "blocks" and "lmcache.kv_cache_layout" to "LBHNC"'
            )


def fails_by_block(groups: Sequence[CacheGroup]) -> bool:
    """Return whether failed loads are reported to vLLM by block.

    Not with several groups: vLLM cannot tell their blocks apart. Nor with a window: vLLM would
    recompute from the first such block on, where the window reaches back to blocks that the request
    never had. Then the request is reported and starts over.
    """
    return len(groups) == 1 and groups[0].window is None


def described(spec: Any) -> str:
    """Return text that differs if the KV of a layer means something else."""
    size = getattr(spec, "page_size_bytes", None)
    return f"{type(spec).__name__}({size},{VLLM_SETTINGS.fingerprint(spec, 'kv_cache_spec')})"
