"""Runs a model on a few tokens to see what KV it keeps, and whether that KV may be reused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

STATIC_ROPE: Final = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""Kinds of rotation that turn a token by its position alone. Any other is refused: `dynamic` and
`longrope` turn the same token otherwise in a longer prompt.
"""
PROBE_TOKENS: Final = 16
PREFIX_TOKENS: Final = 11
_EXACT: Final = 1e-5
"""Relative difference that rounding in float32 leaves where the same shapes are computed."""
_SHOWN: Final = 4
_CLOSE: Final = 1e-3
"""The same where other shapes are computed."""


class Unsupported(ValueError):
    """What was found about a model whose KV cannot be cached."""


@dataclass(frozen=True)
class MeasuredKV:
    """The KV that a model keeps.

    Attributes:
        num_layers: Layers, all of which keep KV.
        key_size: Elements of a head's key.
        value_size: Elements of a head's value: other than of its key with latent attention.
    """

    num_layers: int
    num_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def chunk_heads(self) -> tuple[int, int]:
        """Heads of each side of a chunk, and their size. Where keys and values are not equally
        long, a token's keys and values follow each other, and a side is half of that.
        """
        if self.key_size == self.value_size:
            return self.num_heads, self.key_size
        return 1, -(-self.num_heads * (self.key_size + self.value_size) // 2)

    @property
    def layout(self) -> str:
        """What the shape of a chunk does not say about it."""
        if self.key_size == self.value_size:
            return ""
        return f"joined;heads={self.num_heads};key={self.key_size};value={self.value_size}"

    def allocate(self, num_tokens: int) -> list[torch.Tensor]:
        """Return memory for each layer: for the sides of a chunk, see `sides_in`, and for keys and
        values, see `kv_in`.
        """
        heads, size = self.chunk_heads
        is_joined = bool(self.layout)
        shape = (num_tokens, 2, size) if is_joined else (2, num_tokens, heads, size)
        return [
            torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(self.num_layers)
        ]

    def sides_in(self, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two sides of a chunk in a layer's memory, `[num_tokens, …]`."""
        return (layer[:, 0], layer[:, 1]) if self.layout else (layer[0], layer[1])

    def kv_in(self, layer: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the first tokens in a layer's memory, `[1, num_heads,
        num_tokens, size]`.
        """
        if self.layout:
            row, heads = layer.flatten(1), self.num_heads
            num_keys, num_values = heads * self.key_size, heads * self.value_size
            k = row[:, :num_keys].view(-1, heads, self.key_size)
            v = row[:, num_keys : num_keys + num_values].view(-1, heads, self.value_size)
        else:
            k, v = layer
        return k[:num_tokens].transpose(0, 1)[None], v[:num_tokens].transpose(0, 1)[None]

    def sides_of(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer as the two sides of a chunk, `[num_tokens, …]`.

        Args:
            k: `[1, num_heads, num_tokens, key_size]`.
            v: `[1, num_heads, num_tokens, value_size]`.
        """
        k, v = k[0].transpose(0, 1), v[0].transpose(0, 1)
        if not self.layout:
            return k, v
        row = torch.cat([k.flatten(1), v.flatten(1)], 1)
        _, size = self.chunk_heads
        row = F.pad(row, (0, 2 * size - row.shape[1]))
        return row[:, :size], row[:, size:]


def run(model: PreTrainedModel, tokens: torch.Tensor, cache: DynamicCache) -> Any:
    """Return a model's output for tokens that follow those in the cache.

    Args:
        model: Any model that takes `past_key_values`.
        tokens: Token ids on its device, `[num_tokens]`.
        cache: KV of the tokens before; the model adds that of these.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_it = "logits_to_keep" in parameters or any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()
    )
    only_last = {"logits_to_keep": 1} if takes_it else {}
    return model(input_ids=tokens[None], past_key_values=cache, use_cache=True, **only_last)


def cache_of(
    model: PreTrainedModel, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> DynamicCache:
    """Return a cache that holds these keys and values without a copy; the model's next run replaces
    them layer by layer.

    Args:
        layers: K and V of each layer, `[1, num_heads, num_tokens, head_size]`; none: an empty
            cache.
    """
    cache = DynamicCache(config=model.config)
    for layer, (k, v) in zip(cache.layers, layers, strict=False):
        layer.lazy_initialization(k, v)
        layer.keys, layer.values = k, v
    return cache


def measured_shape(model: PreTrainedModel) -> MeasuredKV:
    """Return what KV a model keeps, from one run on a few tokens.

    Raises:
        ValueError: Not the KV of every token on every layer, alike.
        Exception: What the model itself raises.
    """
    _check_layers(model)
    with torch.no_grad():
        return _after(model, probe_tokens(model), cache_of(model, []))[0]


def measured_kv(model: PreTrainedModel) -> MeasuredKV:
    """Return what KV a model keeps, having seen that the KV of a prefix may be reused.

    Raises:
        ValueError: It may not; the message says what was found.
        Exception: What the model itself raises.
    """
    _check_layers(model)
    _check_rotation(model)
    with torch.no_grad():
        ids = probe_tokens(model)
        prefix, rest = ids[:PREFIX_TOKENS], ids[PREFIX_TOKENS:]
        whole = cache_of(model, [])
        kv, logits = _after(model, ids, whole)
        eps = torch.finfo(kv.dtype).eps

        # The same prefix before other tokens. The shapes are the same, so a causal model computes
        # the same bits, or nearly, if it sorts tokens by expert.
        before_other = cache_of(model, [])
        _after(model, torch.cat([prefix, prefix[: len(rest)]]), before_other)
        _compare(
            "the KV of a token depends on later tokens",
            whole,
            before_other,
            slice(0, PREFIX_TOKENS),
            max(_EXACT, 4 * eps),
        )

        # What a hit does: the prefix by itself, and then the rest, the last token alone.
        alone = cache_of(model, [])
        tolerance = max(_CLOSE, 16 * eps)
        differs = (
            "KV that follows a cached prefix differs from that of the whole prompt, which holds a"
            " token for padding if there is one"
        )
        if _after(model, prefix, alone)[0] != kv:
            raise Unsupported("the shape of its KV depends on the prompt")
        _compare(differs, whole, alone, slice(0, PREFIX_TOKENS), tolerance)
        resumed = cache_of(model, [(k.clone(), v.clone()) for k, v in _sides(alone)])
        _after(model, rest[:-1], resumed, PROBE_TOKENS - 1)
        resumed_logits = _after(model, rest[-1:], resumed, PROBE_TOKENS)[1]
        _compare(differs, whole, resumed, slice(PREFIX_TOKENS, PROBE_TOKENS), tolerance)
        both = torch.stack([resumed_logits, logits])
        both = both[:, both.isfinite().all(0)]
        if not _differences(both[:1], both[1:]).item() <= 4 * tolerance:
            raise Unsupported("the answer that follows a cached prefix differs")
    return kv


def probe_tokens(model: PreTrainedModel) -> torch.Tensor:
    """Return token ids from all over a model's vocabulary on its device, `[PROBE_TOKENS]`. The one
    for padding is among them, other special ones are not: they may stand for an image.
    """
    config = model.config.get_text_config(decoder=True)
    size = vocabulary_of(model) or int(config.vocab_size)
    special = {
        value
        for one in (model.config, config)
        for name, value in vars(one).items()
        if name.endswith(("_token_id", "_token_index", "_token")) and isinstance(value, int)
    }
    plain = [one % size for one in range(3, 3 + 7919 * 4 * PROBE_TOKENS, 7919)]
    ids = [one for one in dict.fromkeys(plain) if one not in special] or [0]
    ids = [ids[i % len(ids)] for i in range(PROBE_TOKENS)]
    padding = getattr(config, "pad_token_id", None)
    if isinstance(padding, int) and 0 <= padding < size:
        ids[PREFIX_TOKENS // 2] = padding
    return torch.tensor(ids, device=model.device)


def vocabulary_of(model: PreTrainedModel) -> int | None:
    """Return how many token ids a model has embeddings for; None if that is not known."""
    try:
        weight = model.get_input_embeddings().weight
    except (NotImplementedError, AttributeError):
        return None
    return len(weight) if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None


def _after(
    model: PreTrainedModel, tokens: torch.Tensor, cache: DynamicCache, num_cached: int | None = None
) -> tuple[MeasuredKV, torch.Tensor]:
    """Run a model on tokens, and return what the cache has become and the last token's logits.

    Raises:
        ValueError: The cache does not have the KV of that many tokens, by default these alone.
    """
    output = run(model, tokens, cache)
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise Unsupported(f"its output {type(output).__name__} has no logits")
    if torch.isnan(logits[0, -1]).any():
        raise Unsupported("its logits are not numbers")
    given = getattr(output, "past_key_values", None)
    if given is not cache:
        raise Unsupported(f"it returns {type(given).__name__}, not the cache of KV it was given")
    return _shape_of(cache, num_cached or len(tokens)), logits[0, -1]


def _shape_of(cache: DynamicCache, num_tokens: int) -> MeasuredKV:
    """Return what a cache holds.

    Raises:
        ValueError: Not the KV of that many tokens on every layer, alike.
    """
    layers = list(cache.layers)
    empty = [i for i, layer in enumerate(layers) if not isinstance(layer.keys, torch.Tensor)]
    if empty:
        raise Unsupported(f"layer {empty[0]} of {len(layers)} keeps no KV")
    found = {
        (tuple(side.shape[:-2]), side.shape[-2], side.dtype, side.device)
        for pair in _sides(cache)
        for side in pair
    }
    sizes = {tuple(side.shape[-1] for side in pair) for pair in _sides(cache)}
    if len(found) > 1 or len(sizes) > 1:
        shapes = sorted(
            {str((tuple(k.shape), tuple(v.shape), str(k.device))) for k, v in _sides(cache)}
        )
        raise Unsupported(f"its layers keep KV of different kinds: {', '.join(shapes[:4])}")
    (batch, length, dtype, device), (key_size, value_size) = found.pop(), sizes.pop()
    if len(batch) != 2 or batch[0] != 1 or length != num_tokens or not dtype.is_floating_point:
        raise Unsupported(
            f"after {num_tokens} tokens its KV is {(*batch, length, key_size)} of {dtype}; expected"
            f" [1, heads, {num_tokens}, size]"
        )
    return MeasuredKV(len(layers), batch[1], key_size, value_size, dtype, device)


def _sides(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _check_layers(model: PreTrainedModel) -> None:
    """Refuse layers that forget tokens, or keep something that is not theirs alone."""
    kinds = [type(layer) for layer in cache_of(model, []).layers]
    others = [f"{i}: {kind.__name__}" for i, kind in enumerate(kinds) if kind is not DynamicLayer]
    if others:
        more = "; …" if len(others) > _SHOWN else ""
        raise Unsupported(
            f"{len(others)} of its {len(kinds)} layers do not keep the KV of every token, and"
            f" nothing else ({'; '.join(others[:_SHOWN])}{more})"
        )


def _compare(
    found: str, whole: DynamicCache, other: DynamicCache, tokens: slice, tolerance: float
) -> None:
    """Compare the KV of these tokens in two caches.

    Raises:
        ValueError: It differs by more than rounding: in float32 for any token, else for most, since
            rounding may send a token to another expert.
    """
    for i, (ours, theirs) in enumerate(zip(_sides(whole), _sides(other), strict=True)):
        for name, a, b in zip(("keys", "values"), ours, theirs, strict=True):
            a, b = (side[0, :, tokens].transpose(0, 1).flatten(1) for side in (a, b))
            if torch.equal(a, b):
                continue
            by_token = _differences(a, b)
            is_exact = a.dtype in (torch.float32, torch.float64)
            worst = (by_token.max() if is_exact else by_token.median()).item()
            if not worst <= tolerance:
                raise Unsupported(f"{found}: {name} of layer {i} differ by {worst:.1%}")


def _differences(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return by how much each row differs, relative to its length, `[num_rows]`."""
    a, b = a.double(), b.double()
    size = torch.maximum(a.norm(dim=-1), b.norm(dim=-1)).clamp_min(1e-30)
    by_row: torch.Tensor = (a - b).norm(dim=-1) / size
    return by_row


def _check_rotation(model: PreTrainedModel) -> None:
    """Refuse rotation that depends on the length of a prompt."""
    config = model.config.get_text_config(decoder=True)
    declared = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    # Of the decoder alone: an encoder of images turns by places in an image.
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    rotary = [
        one for one in decoder.modules() if hasattr(one, "rope_type") or hasattr(one, "inv_freq")
    ]
    kinds = {*_strings(getattr(one, "rope_type", None) for one in rotary), *_kinds(declared)}
    unknown = kinds - STATIC_ROPE
    if unknown:
        raise Unsupported(
            f"rope_type {', '.join(map(repr, sorted(unknown)))} turns a token by the length of the"
            f" prompt; kinds that do not are {', '.join(sorted(STATIC_ROPE))}"
        )
    lengths = {
        int(one)
        for name in ("max_position_embeddings", "original_max_position_embeddings")
        for one in (getattr(config, name, None), *_values(declared, name))
        if isinstance(one, int | float) and one > PROBE_TOKENS
    }
    for module in rotary:
        _check_table(module, sorted(lengths))


def _check_table(module: Any, lengths: Sequence[int]) -> None:
    """Compare how a rotary module turns the first tokens of a short prompt and of longer ones."""
    kinds = getattr(module, "rope_type", None)
    first = torch.arange(PREFIX_TOKENS, device=next(iter(module.buffers()), torch.empty(0)).device)
    x = torch.empty(1, 1, 1, device=first.device)
    for more in [(one,) for one in kinds] if isinstance(kinds, dict) else [()]:

        def table(positions: torch.Tensor, more: tuple[str, ...] = more) -> list[torch.Tensor]:
            return [one[..., :PREFIX_TOKENS, :] for one in module(x, positions[None], *more)]

        try:
            short = table(first)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            continue  # called in a way of its own; its kind was known
        for length in lengths:
            longer = table(torch.cat([first, first.new_tensor([length])]))
            table(first)  # what it remembers of a length is that of a short prompt again
            if not all(map(torch.allclose, short, longer)):
                raise Unsupported(
                    f"{type(module).__name__} turns a token otherwise in prompts of more than"
                    f" {length} tokens"
                )


def _kinds(value: object) -> Iterator[str]:
    """Yield the kinds of rotation that a configuration declares, at any depth."""
    for name in ("rope_type", "type"):
        yield from _strings(_values(value, name))


def _values(value: object, name: str) -> Iterator[object]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _values(one, name)
    elif isinstance(value, dict):
        for key, one in value.items():
            if key == name:
                yield one
            else:
                yield from _values(one, name)


def _strings(values: Any) -> Iterator[str]:
    for one in values:
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            yield from _strings(one.values())
