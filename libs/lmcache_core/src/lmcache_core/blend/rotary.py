"""Rotary position embeddings, forward and back: K computed at one position becomes K at another.

Sources: RoFormer (arXiv 2104.09864), dynamic NTK (no paper), YaRN (arXiv 2309.00071), and the
scaling of Llama 3.1. The reference is what `transformers` computes for the same parameters: the
tests compare with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from lmcache_kernels.rope_rotate import Rotation, rope_rotate

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """How a model rotates, according to its configuration.

    Attributes:
        theta: Base of the wavelengths.
        rotary_dims: How many dimensions of a head, from the first, are rotated; even. None: all.
        kind: How wavelengths are stretched for prompts longer than those of the training.
        factor: By how much; not for "default".
        max_positions: Longest prompt without "dynamic" stretching.
        original_max_positions: Longest prompt of the training, for "yarn" and "llama3".
        attention_factor: Factor of cosines and sines for "yarn"; None: what the paper says for the
            factor.
        mscale: With `mscale_all_dim`, another way to say `attention_factor`.
        mscale_all_dim: See `mscale`.
        beta_fast: Rotations in `original_max_positions` above which "yarn" stretches nothing.
        beta_slow: Rotations below which it stretches by the whole factor.
        truncate: Whether "yarn" takes whole dimensions as the bounds.
        low_freq_factor: Rotations in `original_max_positions` below which "llama3" stretches by the
            whole factor.
        high_freq_factor: Rotations above which it stretches nothing.
        is_interleaved: Whether neighbouring dimensions form a pair (GPT-J), not those half a head
            apart (Llama).
    """

    head_size: int
    theta: float = 10_000.0
    rotary_dims: int | None = None
    kind: RopeKind = "default"
    factor: float = 1.0
    max_positions: int = 2_048
    original_max_positions: int | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    is_interleaved: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeKind):
            raise ValueError(
                f"rotary embedding of kind {self.kind!r}; known are {', '.join(get_args(RopeKind))}"
            )
        if self.num_rotated % 2 or not 0 < self.num_rotated <= self.head_size:
            raise ValueError(
                f"{self.num_rotated} rotated dimensions of heads of {self.head_size}: expected an"
                " even number up to that"
            )
        if self.factor < 1 or self.theta <= 1:
            raise ValueError(
                f"factor {self.factor} and theta {self.theta}: expected at least 1, and more than 1"
            )

    @property
    def num_rotated(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return self.head_size if self.rotary_dims is None else self.rotary_dims

    @property
    def scale(self) -> float:
        """Factor of cosines and sines."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_scale(self.factor, self.mscale) / _yarn_scale(
                self.factor, self.mscale_all_dim
            )
        return _yarn_scale(self.factor, 1.0)

    def frequencies(self, num_positions: int | None = None) -> torch.Tensor:
        """Return the radians per position.

        Args:
            num_positions: Length of the prompt, needed only for "dynamic"; None: at most
                `max_positions`.

        Returns:
            float32 `[num_rotated / 2]`.
        """
        theta = self.theta
        if self.kind == "dynamic":
            length = max(num_positions or 0, self.max_positions)
            stretch = self.factor * length / self.max_positions - (self.factor - 1)
            theta *= stretch ** (self.num_rotated / (self.num_rotated - 2))
        wavelengths = theta ** (
            torch.arange(0, self.num_rotated, 2, dtype=torch.float32) / self.num_rotated
        )
        if self.kind == "linear":
            return 1.0 / wavelengths / self.factor
        if self.kind == "yarn":
            return self._yarn_frequencies(wavelengths)
        return (
            self._llama3_frequencies(1.0 / wavelengths)
            if self.kind == "llama3"
            else 1.0 / wavelengths
        )

    def _yarn_frequencies(self, wavelengths: torch.Tensor) -> torch.Tensor:
        low, high = (
            self._dimension_of(rotations) for rotations in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.num_rotated - 1)
        if low == high:
            high += 0.001  # no division by zero
        ramp = (
            (torch.arange(self.num_rotated // 2, dtype=torch.float32) - low) / (high - low)
        ).clamp(0, 1)
        kept = 1 - ramp
        return 1.0 / (self.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept

    def _dimension_of(self, num_rotations: float) -> float:
        """Return the dimension that makes `num_rotations` turns in the training's prompts."""
        trained = self.original_max_positions or self.max_positions
        turns = trained / (num_rotations * 2 * math.pi)
        return self.num_rotated * math.log(turns) / (2 * math.log(self.theta))

    def _llama3_frequencies(self, frequencies: torch.Tensor) -> torch.Tensor:
        trained = self.original_max_positions or self.max_positions
        turns = trained * frequencies / (2 * math.pi)
        smooth = (
            (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        ).clamp(0, 1)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies


class RotaryEmbedding:
    """Rotates Q and K like a model, and back.

    Its methods have the form that `CacheBlendImpl` expects.

    Args:
        num_positions: Length of the prompt that the model rotates for, see
            `RopeParameters.frequencies`.
        original_num_positions: Length of the prompts whose KV is cached; needed only for "dynamic".
    """

    def __init__(
        self,
        parameters: RopeParameters,
        num_positions: int | None = None,
        original_num_positions: int | None = None,
    ) -> None:
        self._parameters = parameters
        self._frequencies = parameters.frequencies(num_positions)
        self._original_frequencies = parameters.frequencies(original_num_positions)

    def encode(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate Q and K at their positions.

        Args:
            positions: `[num_tokens]`, any integer dtype.
            q: `[num_tokens, …]`, heads of `head_size` last or flattened.
            k: As `q`, of any number of heads.

        Returns:
            New tensors of the same shapes and dtypes.
        """
        at = self._table(positions, self._frequencies, self._parameters.scale)
        rotation = self._rotation(None, at)
        return self._rotated(q, rotation), self._rotated(k, rotation)

    def decode(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Undo `encode` for cached KV. Arguments as there."""
        at = self._table(positions, self._original_frequencies, 1 / self._parameters.scale)
        rotation = self._rotation(at, None)
        return self._rotated(q, rotation), self._rotated(k, rotation)

    def mover(
        self, original_positions: torch.Tensor, positions: torch.Tensor
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that decodes at the original positions and encodes at the new ones, in
        one step and one rounding.

        Args:
            original_positions: `[num_tokens]`.
            positions: `[num_tokens]`.

        Returns:
            Function that rotates cached K of one layer, `[num_tokens, …]`, into a new tensor of the
                same shape and dtype.
        """
        source = self._table(original_positions, self._original_frequencies)
        target = self._table(positions, self._frequencies)
        return partial(self._rotated, rotation=self._rotation(source, target))

    def _table(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scale: float = 1.0
    ) -> torch.Tensor:
        """Return cosines and sines times `scale`, float32 `[num_tokens, num_rotated]`."""
        angles = positions.float()[:, None] * frequencies.to(positions.device)
        return torch.cat([angles.cos(), angles.sin()], -1) * scale

    def _rotation(self, source: torch.Tensor | None, target: torch.Tensor | None) -> Rotation:
        """Return the rotation of each token from its row of one table to its row of the other;
        None: not rotated.
        """
        table = source if target is None else target
        assert table is not None
        unrotated = torch.zeros_like(table)
        unrotated[:, : table.shape[1] // 2] = 1.0  # the cosines
        rows = torch.arange(len(table), device=table.device)
        source, target = (unrotated if side is None else side for side in (source, target))
        return Rotation(rows, rows, source, target, self._parameters.is_interleaved)

    def _rotated(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        head_size, num_tokens = self._parameters.head_size, len(rotation.source)
        width = x.shape[1:].numel()
        if len(x) != num_tokens or width % head_size:
            raise ValueError(
                f"a tensor of {tuple(x.shape)} cannot be rotated at {num_tokens} positions by heads"
                f" of {head_size}"
            )
        heads = x.reshape(num_tokens, width // head_size, head_size)
        return rope_rotate(heads.contiguous(), rotation).view(x.shape)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
