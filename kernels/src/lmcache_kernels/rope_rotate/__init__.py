"""`rope_rotate`: rotates cached K from the positions where it was computed to others. The maths:
`README.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmcache_kernels.checks import FLOATS, check_tensor
from lmcache_kernels.errors import KernelInputError
from lmcache_kernels.rope_rotate.reference import rope_rotate_reference

__all__ = ["Rotation", "rope_rotate", "rope_rotate_reference"]


@dataclass(frozen=True, eq=False)
class Rotation:
    """The positions that tokens are rotated from and to; the same for all layers.

    Attributes:
        source: int64 `[num_tokens]`: current positions of K.
        target: int64 `[num_tokens]`: new positions of K.
        source_table: float32 `[num_positions, num_rotated]`: cosines of each pair of dimensions,
            then sines.
        target_table: The same for the target positions; may have another number of positions.
        is_interleaved: Whether adjacent dimensions form a pair, not those `num_rotated / 2` apart.

    Raises:
        KernelInputError: They do not match, or a position is not in its table. Checking positions
            waits for the device.
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
            device = self.source.device
            check_tensor(f"{name} positions", positions, (torch.int64,), (None,), device)
            check_tensor(f"{name} table", table, (torch.float32,), (None, None), device)
            if table.shape[1] % 2 or not table.shape[1]:
                raise KernelInputError(
                    f"{name} table has {table.shape[1]} columns; must be even, at least 2"
                )
            if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(
                table
            ):
                raise KernelInputError(
                    f"{name} positions range from {int(positions.min())} to {int(positions.max())};"
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
        rotation: Source and target positions.
        out: Written: of K's shape, dtype and device, contiguous; may be `k`, but not another part
            of its memory. None allocates a new tensor.

    Returns:
        `out`.

    Raises:
        KernelInputError: The tensors do not match; nothing was written.
    """
    device = rotation.source.device
    check_tensor("K", k, FLOATS, (len(rotation.source), None, None), device)
    if k.shape[2] < rotation.num_rotated:
        raise KernelInputError(
            f"K has heads of {k.shape[2]}; must be at least {rotation.num_rotated} dimensions"
        )
    if out is None:
        out = torch.empty_like(k)
    check_tensor("out", out, (k.dtype,), k.shape, device)
    if out.data_ptr() != k.data_ptr() and abs(out.data_ptr() - k.data_ptr()) < k.nbytes:
        raise KernelInputError("out overlaps a part of K; expected K itself, or other memory")
    if k.device.type == "cuda":
        from lmcache_kernels.rope_rotate.kernel import launch

        launch(k, rotation, out)
    else:
        rope_rotate_reference(k, rotation, out)
    return out
