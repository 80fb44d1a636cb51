"""On a CPU, what vLLM's two Triton kernels do with recurrent state when there are drafts: vLLM has
no other code for them, and without them it cannot serve drafts with recurrent state there.

A request's state is one block per group. With drafts it is that block and the next ones: in block
`t` after it is the state after `t` drafts, and its convolutions remember so many tokens more.

Source: `postprocess_mamba_fused_kernel`, `precopy_mamba_align_fused_kernel` and
    `_copy_mamba_state_block` in `vllm/v1/worker/mamba_utils.py`, 0.32.0.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

MODULE = "vllm.v1.worker.mamba_utils"


def register() -> None:
    """Have vLLM use them in this process."""
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels(
        {
            f"{MODULE}.postprocess_mamba_fused_kernel": _keep_state_at_block_end,
            f"{MODULE}.precopy_mamba_align_fused_kernel": _begin_block,
        }
    )


@dataclass(frozen=True)
class _States:
    """Where each state tensor is, as the kernels get it."""

    tables: Any
    table_stride: int
    addresses: Any
    block_strides: Any
    element_sizes: Any
    inner_sizes: Any
    conv_widths: Any
    groups: Any
    num_rows: Any
    row_strides: Any
    is_dim_first: bool

    def copy(self, request: int, source: int, target: int, num_more: int) -> None:
        """Copy the state after `num_more` tokens from one place of a block table to another."""
        for i in range(len(self.addresses)):
            at = int(self.tables[int(self.groups[i])]) + 4 * request * self.table_stride
            table = ctypes.cast(at, ctypes.POINTER(ctypes.c_int32))
            base, stride = int(self.addresses[i]), int(self.block_strides[i])
            element, inner = int(self.element_sizes[i]), int(self.inner_sizes[i])
            width, to = int(self.conv_widths[i]), base + table[target] * stride
            if width == 0:
                ctypes.memmove(to, base + table[source + num_more] * stride, inner * element)
                continue
            begin, size = base + table[source] * stride, (width - num_more) * element
            if not self.is_dim_first:
                ctypes.memmove(to, begin + num_more * inner * element, size * inner)
                continue
            for row in range(int(self.num_rows[i])):
                of_row = row * int(self.row_strides[i])
                ctypes.memmove(to + of_row, begin + of_row + num_more * element, size)


def _keep_state_at_block_end(
    num_accepted: Any,
    state_columns: Any,
    num_scheduled: Any,
    num_computed: Any,
    num_drafts: Any,
    *states: Any,
    block_size: int,
    CONV_STATE_DIM_FIRST: bool,
    **_: Any,
) -> None:
    """After a step: where accepted tokens have filled a block, copy the state after its last one
    into it.
    """
    *where, num_accepted_out, _mapping, num_requests = states
    copier = _States(*where, CONV_STATE_DIM_FIRST)
    for i in range(num_requests):
        source, accepted = int(state_columns[i]), int(num_accepted[i])
        num_running = int(num_computed[i]) + int(num_scheduled[i]) - int(num_drafts[i])
        aligned = (num_running + accepted - 1) // block_size * block_size
        if aligned < num_running:
            continue
        target, num_more = aligned // block_size - 1, aligned - num_running
        if source == target:
            num_accepted_out[i] = 1
        if source != target or num_more:
            copier.copy(i, source, target, num_more)


def _begin_block(
    state_columns: Any,
    source_columns: Any,
    num_more: Any,
    *states: Any,
    CONV_STATE_DIM_FIRST: bool,
    **_: Any,
) -> None:
    """Before a step: copy the states of requests that go on in another block there."""
    *where, _mapping, num_requests = states
    copier = _States(*where, CONV_STATE_DIM_FIRST)
    for i in range(num_requests):
        source, target = int(source_columns[i]), int(state_columns[i])
        if source >= 0 and source != target:
            copier.copy(i, source, target, int(num_more[i]))
