"""Copies of long runs of bytes between pinned host memory and a GPU's pages by its copy engines:
without a kernel, without staging, and without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from lmcache_kernels.paged_copy.descriptors import Addresses, Descriptors

from lmcache_core.gpu_connectors.streams import has_streams
from lmcache_core.memory.tensor import COPY_BOUNDARY_BYTES

LEAST_RUN_BYTES = 28 << 10
"""Mean length from which on copy engines are taken. Not measured here: vLLM 0.32 has measured it on
an H100, for loads. Source: its `v1/kv_offload/cpu/swap_blocks_triton.py`.
"""
IN_STREAM_ORDER = 1

BatchedCopy = Callable[..., int]


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`: order of accesses to the sources, two locations, flags."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


@functools.cache
def batched_copy() -> BatchedCopy | None:
    """Return `cuMemcpyBatchAsync` of the driver; None before CUDA 12.8."""
    try:
        call = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
    except (OSError, AttributeError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    call.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer]
    call.restype = ctypes.c_int
    return call


class CopyEngine:
    """What a connector's long runs are copied by. Thread-safe."""

    def __init__(self) -> None:
        self._is_refused = False

    def serves(self, device: torch.device) -> bool:
        """Return whether the driver can copy runs from and to a device, and has not refused it."""
        return has_streams(device) and not self._is_refused and batched_copy() is not None

    def takes(self, copies: Sequence[Descriptors], host: torch.Tensor) -> bool:
        """Return whether these are copied by it: all have long runs, on average, and the host
        memory is pinned.

        Args:
            host: The chunk, of whose memory a beginning may be pinned.
        """
        are_long = all(copy.sizes.sum() >= LEAST_RUN_BYTES * len(copy.sizes) for copy in copies)
        return are_long and host.is_pinned() and host[-1:].is_pinned()

    def launch(
        self, copy: Descriptors, chunk: torch.Tensor, device: torch.device, to_pages: bool
    ) -> None:
        """Launch a copy on the current stream.

        Args:
            chunk: uint8, flat, in pinned host memory.

        Raises:
            RuntimeError: The driver refuses it; none is taken any more.
        """
        call = batched_copy()
        assert call is not None, "it takes no copy"
        pages, inside, sizes = _cut(copy, chunk.data_ptr())
        targets, sources = (pages, inside) if to_pages else (inside, pages)
        attributes, first, failed = (
            _Attributes(IN_STREAM_ORDER),
            ctypes.c_size_t(),
            ctypes.c_size_t(),
        )
        error = call(
            *(array.ctypes.data for array in (targets, sources, sizes)),
            len(sizes),
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            ctypes.byref(failed),
            torch.cuda.current_stream(device).cuda_stream,
        )
        if error:
            self._is_refused = True
            raise RuntimeError(
                f"cuMemcpyBatchAsync: error {error} at {failed.value} of {len(sizes)}; kernels copy"
                " from now on"
            )


def _cut(copy: Descriptors, base: int) -> tuple[Addresses, Addresses, Addresses]:
    """Return the addresses of runs in the pages and in the chunk, and their lengths; no run is in
    two registrations of host memory.
    """
    inside = copy.chunk + np.uint64(base)
    room = COPY_BOUNDARY_BYTES - inside % COPY_BOUNDARY_BYTES
    cut = np.flatnonzero(copy.sizes > room)
    if not len(cut):
        return copy.pages, inside, copy.sizes
    pages = np.concatenate((copy.pages, copy.pages[cut] + room[cut]))
    sizes = np.concatenate((np.minimum(copy.sizes, room), copy.sizes[cut] - room[cut]))
    return pages, np.concatenate((inside, inside[cut] + room[cut])), sizes
