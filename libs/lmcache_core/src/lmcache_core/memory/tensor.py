"""Memory objects and allocators over torch tensors: host, pinned host, GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lmcache_core._typing import override
from lmcache_core.errors import CapacityError, ConfigError
from lmcache_core.forks import ProcessMark
from lmcache_core.memory.arena import touched_memory
from lmcache_core.memory.base import MemoryFormat, MemoryObjMetadata
from lmcache_core.memory.counted import CountedMemoryObj, CountingAllocator
from lmcache_core.memory.dtypes import dtype_name
from lmcache_core.memory.free_list import ALIGN_BYTES as _ALIGN_BYTES
from lmcache_core.memory.free_list import FreeList
from lmcache_core.memory.views import bytes_under

logger = logging.getLogger(__name__)

MAX_PIECE_BYTES = 64 << 30
"""Largest size to register in one call; drivers refuse 512 GiB and more."""
COPY_BOUNDARY_BYTES = 32 << 20
"""Registrations end, and copies are split (`copy_parts`), at addresses that are multiples of this:
CUDA may refuse a copy that touches two registrations. Other calls of CUDA may wait for one of them,
about 3 ms for so many bytes.
"""
_RELAXED = 2
"""Source: CUDA, driver_types.h, `cudaStreamCaptureModeRelaxed`."""
MAPS = Path("/proc/self/maps")
RUNTIMES = "libcudart", "libamdhip64"
"""Names in the files of CUDA's runtime, and of ROCm's."""


class TensorMemoryObj(CountedMemoryObj):
    """A flat byte tensor with a description of its content.

    Args:
        raw_data: uint8, flat, at least `metadata.get_size()` elements, on any device; or exactly
            its bytes in host memory.
        allocator: Frees it; without one the tensor belongs to the garbage collector.
    """

    __slots__ = ("_on_device",)

    def __init__(
        self,
        raw_data: torch.Tensor | memoryview,
        metadata: MemoryObjMetadata,
        allocator: CountingAllocator | None = None,
    ) -> None:
        # Host memory is kept as bytes: creating a view of bytes takes a tenth of a tensor's time.
        self._on_device: torch.Tensor | None = None
        if not isinstance(raw_data, memoryview):
            if raw_data.is_cpu:
                raw_data = bytes_under(raw_data)[: metadata.get_size()]
            else:
                self._on_device, raw_data = raw_data, memoryview(b"")
        super().__init__(raw_data, metadata, allocator)

    @property
    @override
    def byte_array(self) -> memoryview:
        """Host memory only.

        Raises:
            ValueError: The memory is on another device.
        """
        if self._on_device is not None:
            raise ValueError(
                f"memory on {self._on_device.device} has no bytes that this process can address:"
                " use .tensor, or copy it to the host"
            )
        if self.metadata.ref_count <= 0:
            self._require_held()
        return self._view

    @override
    def get_size(self) -> int:
        return len(self._view) if self._on_device is None else self.metadata.get_size()

    @property
    @override
    def tensor(self) -> torch.Tensor:
        if self._on_device is None:
            return super().tensor
        self._require_held()
        meta = self.metadata
        dtype = torch.uint8 if meta.dtype is None else getattr(torch, dtype_name(meta.dtype))
        return self._on_device[: self.get_size()].view(dtype).view(tuple(meta.shape))


class TensorMemoryAllocator(CountingAllocator):
    """An explicit-list allocator over one byte tensor. Thread-safe.

    Args:
        tensor: Contiguous, on any device with memory; its bytes become the arena.

    Raises:
        ValueError: The tensor is not contiguous, or has no memory.
    """

    ALIGN_BYTES = _ALIGN_BYTES

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta" or not tensor.is_contiguous():
            raise ValueError(
                f"an arena needs a contiguous tensor with memory, not strides {tensor.stride()} on"
                f" {tensor.device}"
            )
        self._raw = tensor.detach().view(-1).view(torch.uint8)
        self._memory = bytes_under(self._raw) if tensor.device.type == "cpu" else self._raw
        super().__init__(FreeList(self._raw.numel()))

    @override
    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | str | None,
        fmt: MemoryFormat = MemoryFormat.KV_BLOB,
    ) -> TensorMemoryObj | None:
        meta = self._take(torch.Size(shape), dtype, fmt)
        if meta is None:
            return None
        return TensorMemoryObj(
            self._memory[meta.address : meta.address + meta.get_size()], meta, self
        )


class HostMemoryAllocator(TensorMemoryAllocator):
    """An arena of plain host memory, aligned to a page and touched at construction.

    Args:
        size: Bytes.

    Raises:
        ValueError: The size is negative.
        CapacityError: The machine does not have that much.
    """

    def __init__(self, size: int) -> None:
        super().__init__(host_arena(size))


class PinMemoryAllocator(HostMemoryAllocator):
    """An arena of pinned host memory, which CUDA copies from and to directly; plain host memory
    without CUDA.

    Args:
        size: Bytes.

    Raises:
        ValueError: The size is negative.
        CapacityError: The machine does not have that much.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.is_pinned = pin(self._raw, self)


class GPUMemoryAllocator(TensorMemoryAllocator):
    """An arena on a device.

    Args:
        size: Bytes.
        device: "cuda", "cuda:1", …; "cpu" works too.

    Raises:
        ValueError: The size is negative.
        ConfigError: There is no such device.
        CapacityError: It does not have that much memory.
    """

    def __init__(self, size: int, device: str = "cuda") -> None:
        super().__init__(device_arena(size, device))


def host_arena(size: int) -> torch.Tensor:
    """Return uint8 `[size]` in host memory, aligned to a page and touched.

    Raises:
        ValueError: The size is negative.
        CapacityError: The machine does not have that much.
    """
    return torch.frombuffer(touched_memory(size), dtype=torch.uint8)[:size]


def device_arena(size: int, device: str) -> torch.Tensor:
    """Return uint8 `[size]` on that device, touched.

    Raises:
        ValueError: The size is negative.
        ConfigError: There is no such device.
        CapacityError: It does not have that much memory.
    """
    try:
        where = torch.device(device)
    except RuntimeError as exc:
        raise ConfigError(
            f"device={device!r}: torch knows no such device; use 'cuda', 'cuda:1' or 'cpu'"
        ) from exc
    if where.type == "cpu":
        return host_arena(size)
    if size < 0:
        raise ValueError(f"size={size}: must not be negative")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={device!r}: this process sees {torch.cuda.device_count()} CUDA devices;"
            " install a CUDA build of torch and make the GPU visible, or use device='cpu'"
        )
    try:
        return torch.zeros(size, dtype=torch.uint8, device=where)
    except torch.OutOfMemoryError as exc:
        raise CapacityError(
            f"an arena of {size / (1 << 30):.2f} GB on {device}: {exc}; make it smaller"
        ) from exc


class HostRegistration:
    """Pins a host arena's pages for CUDA, in place and piece by piece, until `owner` is collected.
    Not thread-safe.

    The pages are registered rather than allocated by torch, whose pinned allocator rounds up to a
    power of two.

    Args:
        arena: uint8, flat.
        owner: Outlives all copies.
        device: The one in whose context the pages are pinned and unpinned, in whatever thread. All
            devices can copy from and to them.
        piece_bytes: Bytes to register in one call; at least `COPY_BOUNDARY_BYTES`.

    Attributes:
        num_bytes: Bytes that are pinned: the first ones of the arena.
    """

    def __init__(
        self, arena: torch.Tensor, owner: object, device: torch.device, piece_bytes: int
    ) -> None:
        # Kept here, so that its pages are not freed before they are unpinned.
        self._arena = arena
        self._device = device
        self._piece_bytes = piece_bytes
        self._addresses: list[int] = []
        self.num_bytes = 0
        weakref.finalize(owner, self._unpin, ProcessMark())

    @property
    def is_whole(self) -> bool:
        """Return whether all of the arena is pinned."""
        return self.num_bytes == self._arena.nbytes

    def pin_next(self) -> int:
        """Pin the next piece; return the error of CUDA, which has refused it, or 0."""
        first = self._arena.data_ptr()
        begin = first + self.num_bytes
        end = (begin + self._piece_bytes) // COPY_BOUNDARY_BYTES * COPY_BOUNDARY_BYTES
        num_bytes = min(end, first + self._arena.nbytes) - begin
        with _allowed_beside_captures(self._device):
            error = int(_cuda_runtime().cudaHostRegister(begin, num_bytes, 0))
        if error != 0:
            # Torch would raise it at its next, unrelated call.
            for take_error in _in_loaded_runtimes("GetLastError"):
                take_error()
            return error
        self._addresses.append(begin)
        self.num_bytes += num_bytes
        return 0

    def log_refusal(self, error: int, what_follows: str) -> None:
        """Log that CUDA refuses the rest."""
        logger.warning(
            "cannot pin all of the arena, the rest stays pageable and copies are slower:"
            " pinned_bytes=%d of=%d error=%d%s",
            self.num_bytes,
            self._arena.nbytes,
            error,
            what_follows,
        )

    def _unpin(self, process: ProcessMark) -> None:
        """Unpin unless this is a forked child, which has pinned nothing and cannot use CUDA."""
        if process.is_here and self._addresses:
            with _allowed_beside_captures(self._device):
                for address in self._addresses:
                    _cuda_runtime().cudaHostUnregister(address)


def pin(
    arena: torch.Tensor,
    owner: object,
    device: torch.device | None = None,
    piece_bytes: int = MAX_PIECE_BYTES,
) -> bool:
    """Pin a host arena's pages at once, as `HostRegistration` does; log it if CUDA is missing or
    refuses.

    Args:
        device: By default the current one.

    Returns:
        Whether all of them are pinned.
    """
    if not can_pin(arena.nbytes):
        return False
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device())
    registration = HostRegistration(arena, owner, device, piece_bytes)
    while not registration.is_whole:
        error = registration.pin_next()
        if error != 0:
            registration.log_refusal(error, "")
            return False
    return True


def can_pin(num_bytes: int) -> bool:
    """Return whether an arena of that size can be pinned; log it if not."""
    has = bool(torch.cuda.is_available())
    if not has:
        logger.info(
            "no CUDA device, the arena is plain host memory: size_gb=%.2f", num_bytes / (1 << 30)
        )
    return has and num_bytes > 0


def copy_parts(host: torch.Tensor) -> Iterator[slice]:
    """Return the parts of host memory, uint8 and flat, in which it is copied to or from a device:
    each is within one registration, if the memory is pinned.
    """
    begin, num_bytes, address = 0, host.nbytes, host.data_ptr()
    while begin < num_bytes:
        end = min(begin + COPY_BOUNDARY_BYTES - (address + begin) % COPY_BOUNDARY_BYTES, num_bytes)
        yield slice(begin, end)
        begin = end


@contextlib.contextmanager
def _allowed_beside_captures(device: torch.device) -> Iterator[None]:
    """Select a device, and let this thread make calls that CUDA forbids while any thread captures a
    graph in the default mode; without this, they would also break that capture.
    """
    mode = ctypes.c_int(_RELAXED)
    # The mode is the driver's, whichever runtime is asked.
    found = _in_loaded_runtimes("ThreadExchangeStreamCaptureMode")
    exchange: Callable[[Any], int] = found[0] if found else lambda mode: 0
    with torch.cuda.device(device):
        exchange(ctypes.pointer(mode))
        try:
            yield
        finally:
            exchange(ctypes.pointer(mode))


def _in_loaded_runtimes(name: str) -> list[Callable[..., int]]:
    """Return a function that torch's binding lacks, of each loaded runtime of CUDA or ROCm: there
    may be others than torch's.
    """
    found = []
    for library in _loaded_runtimes():
        for prefix in ("cuda", "hip"):
            with contextlib.suppress(AttributeError):
                found.append(getattr(library, prefix + name))
    return found


@functools.cache  # a large process takes milliseconds to list what it has mapped
def _loaded_runtimes() -> list[ctypes.CDLL]:
    paths, found = set(), []
    with contextlib.suppress(OSError):
        lines = MAPS.read_text().splitlines()
        paths = {
            line.split(maxsplit=5)[5] for line in lines if any(name in line for name in RUNTIMES)
        }
    for path in sorted(paths):
        with contextlib.suppress(OSError):
            found.append(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW))
    return found


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
