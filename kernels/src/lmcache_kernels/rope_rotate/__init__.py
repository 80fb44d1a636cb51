"""`rope_rotate`: cached K from the positions where it was computed to others. The maths:
`README.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmcache_kernels.errors import KernelInputError
from lmcache_kernels.rope_rotate.reference import rope_rotate_reference

__all__ = ["Rotation", "rope_rotate", "rope_rotate_reference"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class Rotation:
    """From where to where tokens are rotated; the same for all layers.

    Attributes:
        source: int64 `[num_tokens]`: positions that K carries.
        target: int64 `[num_tokens]`: positions that it is to carry.
        source_table: float32 `[num_positions, num_rotated]`: cosines of each pair of dimensions,
            then sines.
        target_table: The same for the target positions; of any number of positions.
        is_interleaved: Whether neighbours form a pair, not dimensions half of `num_rotated` apart.

    Raises:
        KernelInputError: They do not fit together, or a position is not in its table. Positions are
            looked at: this waits for the device.
    """

    source: torch.Tensor
    target: torch.Tensor
    source_table: torch.Tensor
    target_table: torch.Tensor
    is_interleaved: bool = False

    def __post_init__(self) -> None:
        for name, positions, table in (
            ("source", self.source, self.source_table),
            ("target", self.target, self.target_table),
        ):
            if (
                positions.dtype != torch.int64
                or positions.ndim != 1
                or not positions.is_contiguous()
            ):
                raise KernelInputError(
                    f"{name} positions are {positions.dtype} {tuple(positions.shape)}; expected"
                    " contiguous int64 [num_tokens]"
                )
            if (
                table.dtype != torch.float32
                or table.ndim != 2
                or table.shape[1] % 2
                or not table.shape[1]
                or not table.is_contiguous()
            ):
                raise KernelInputError(
                    f"{name} table is {table.dtype} {tuple(table.shape)}; expected contiguous"
                    " float32 [positions, even, at least 2]"
                )
            if not positions.device == table.device == self.source.device:
                devices = f"positions on {positions.device}, their table on {table.device}"
                raise KernelInputError(
                    f"{name} {devices}; expected both on {self.source.device}, as the source"
                    " positions"
                )
            if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(
                table
            ):
                raise KernelInputError(
                    f"{name} positions reach from {int(positions.min())} to {int(positions.max())};"
                    f" the table has {len(table)}"
                )
        if (
            len(self.source) != len(self.target)
            or self.source_table.shape[1] != self.target_table.shape[1]
        ):
            raise KernelInputError(
                f"{len(self.source)} source and {len(self.target)} target positions, tables of"
                f" {self.source_table.shape[1]} and {self.target_table.shape[1]} dimensions; each"
                " pair must be equal"
            )

    @property
    def num_rotated(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.source_table.shape[1]


def rope_rotate(
    k: torch.Tensor, rotation: Rotation, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rotate K of one layer. Does not wait for the device.

    Args:
        k: bfloat16, float16 or float32 `[num_tokens, num_heads, head_size]`, contiguous, on the
            rotation's device.
        rotation: From where to where.
        out: Written: of K's shape, dtype and device, contiguous; may be `k`, but not another part
            of its memory. None makes a new tensor.

    Returns:
        `out`.

    Raises:
        KernelInputError: The tensors do not fit together; nothing was written.
    """
    if (
        k.dtype not in _DTYPES
        or k.ndim != 3
        or not k.is_contiguous()
        or len(k) != len(rotation.source)
        or k.shape[2] < rotation.num_rotated
    ):
        expected = f"[{len(rotation.source)}, heads, >= {rotation.num_rotated}]"
        raise KernelInputError(
            f"K is {k.dtype} {tuple(k.shape)}; expected contiguous floating-point {expected}"
        )
    if k.device != rotation.source.device:
        raise KernelInputError(f"K is on {k.device}, positions on {rotation.source.device}")
    if out is None:
        out = torch.empty_like(k)
    elif (
        out.shape != k.shape
        or out.dtype != k.dtype
        or out.device != k.device
        or not out.is_contiguous()
    ):
        raise KernelInputError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; expected the shape, dtype and"
            " device of K, contiguous"
        )
    elif out.data_ptr() != k.data_ptr() and abs(out.data_ptr() - k.data_ptr()) < k.nbytes:
        raise KernelInputError("out lies over a part of K; expected K itself, or other memory")
    if k.device.type == "cuda":
        from lmcache_kernels.rope_rotate.kernel import launch

        launch(k, rotation, out)
    else:
        rope_rotate_reference(k, rotation, out)
    return out
