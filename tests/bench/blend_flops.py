"""Floating-point operations of a prefill: from a model's shape, and as counted while it runs. Two
for each multiplication and addition.

A causal attention multiplies each query with the keys up to its own; one with a mask multiplies all
pairs, also those that it then masks. Norms, rotations and whatever else is not a matrix product are
left out: together they are below one in a hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker
from transformers import LlamaConfig

T = TypeVar("T")
_LINEAR = (torch.ops.aten.mm, torch.ops.aten.addmm)
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Flops:
    """What was multiplied.

    Attributes:
        linear: In projections, the MLPs and the head.
        attention: Of queries with keys, and of weights with values.
    """

    linear: int
    attention: int

    @property
    def total(self) -> int:
        """Both."""
        return self.linear + self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.linear + other.linear, self.attention + other.attention)


@dataclass(frozen=True)
class LayerWork:
    """What one layer is given to do.

    Attributes:
        num_projected: Tokens whose Q, K and V are computed.
        num_finished: Tokens that go on from there: their attention, its output, the MLP.
        num_pairs: Queries times keys of one head.
    """

    num_projected: int
    num_finished: int
    num_pairs: int


def pairs(num_queries: int, num_keys: int, is_causal: bool) -> int:
    """Queries times keys that one head multiplies; of a causal attention, whose queries and keys
    are as many, half.
    """
    return num_queries * (num_queries + 1) // 2 if is_causal else num_queries * num_keys


def layers_in_full(config: LlamaConfig, num_tokens: int) -> list[LayerWork]:
    """The work of a full prefill."""
    return [LayerWork(num_tokens, num_tokens, pairs(num_tokens, num_tokens, True))] * int(
        config.num_hidden_layers
    )


def layers_blended(
    config: LlamaConfig, num_tokens: int, num_computed: int, check_layer: int
) -> list[LayerWork]:
    """The work of a blended prefill at most: every chosen query with every key.

    Args:
        config: Of the model.
        num_tokens: Of the prompt.
        num_computed: Tokens that are computed behind the check layer.
        check_layer: Where they are chosen.
    """
    chosen = pairs(num_computed, num_tokens, False)
    before = layers_in_full(config, num_tokens)[:check_layer]
    behind = [LayerWork(num_computed, num_computed, chosen)] * (
        int(config.num_hidden_layers) - check_layer - 1
    )
    return [*before, LayerWork(num_tokens, num_computed, chosen), *behind]


def prefill_flops(config: LlamaConfig, layers: Sequence[LayerWork], num_logits: int = 1) -> Flops:
    """Sum over the layers and the head.

    Args:
        config: Of the model.
        layers: What each does.
        num_logits: Tokens whose logits are computed.
    """
    hidden, width = int(config.hidden_size), int(config.num_attention_heads * config.head_dim)
    kv_width = int(config.num_key_value_heads * config.head_dim)
    flops = Flops(2 * num_logits * hidden * int(config.vocab_size), 0)
    for layer in layers:
        projected = layer.num_projected * hidden * (width + 2 * kv_width)
        finished = layer.num_finished * hidden * (width + 3 * int(config.intermediate_size))
        flops += Flops(2 * (projected + finished), 4 * layer.num_pairs * width)
    return flops


def counted(work: Callable[[], T]) -> tuple[Flops, T]:
    """Do the work on the CPU, and count the products that it really asks for.

    Returns:
        What was counted, and what the work returned.
    """
    counter = FlopCounterMode(display=False, custom_mapping={_ATTENTION: _attention_flops})
    counter.mod_tracker = _NoModules()
    with counter:
        returned = work()
    by_kind = counter.get_flop_counts().get("Global", {})
    return (
        Flops(sum(by_kind.get(kind, 0) for kind in _LINEAR), by_kind.get(_ATTENTION, 0)),
        returned,
    )


class _NoModules(ModuleTracker):
    """Counts everything as one: hooks in every module would keep a model from the cache."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def _attention_flops(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: object,
) -> int:
    num_sequences, num_heads, num_queries, head_size = q
    return 2 * num_sequences * num_heads * pairs(num_queries, k[2], is_causal) * (head_size + v[3])
