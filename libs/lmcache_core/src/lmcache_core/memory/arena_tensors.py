"""Whole arenas as flat byte tensors: host, pinned host, device."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import weakref
from pathlib import Path
from typing import Any

import torch

from lmcache_core.errors import CapacityError, ConfigError
from lmcache_core.memory.arena import touched_memory

logger = logging.getLogger(__name__)

MAX_PIECE_BYTES = 64 << 30
"""Registered in one call; drivers refuse calls of 512 GiB and more."""


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


def pin(arena: torch.Tensor, owner: object) -> bool:
    """Lock a host arena's pages for CUDA, in place, until `owner` is collected; without CUDA, or
    when it refuses, say so in the log.

    The pages are registered rather than allocated by torch, whose pinned allocator rounds up to a
    power of two.

    Returns:
        Whether they are pinned.
    """
    if not torch.cuda.is_available():
        logger.info(
            "no CUDA device: the arena of %.2f GB is plain host memory", arena.nbytes / (1 << 30)
        )
        return False
    if arena.nbytes == 0:
        return False
    addresses: list[int] = []
    for at in range(0, arena.nbytes, MAX_PIECE_BYTES):
        address = arena.data_ptr() + at
        code = int(
            _cuda_runtime().cudaHostRegister(address, min(MAX_PIECE_BYTES, arena.nbytes - at), 0)
        )
        if code != 0:
            _unpin(arena, addresses)
            _take_pending_error()
            logger.warning(
                "cannot pin the arena, it stays pageable and copies are slower: size_gb=%.2f"
                " error=%d",
                arena.nbytes / (1 << 30),
                code,
            )
            return False
        addresses.append(address)
    # The finalizer holds the arena, so that its pages cannot go before they are unpinned.
    weakref.finalize(owner, _unpin, arena, addresses)
    return True


def _unpin(arena: torch.Tensor, addresses: list[int]) -> None:
    for address in addresses:
        _cuda_runtime().cudaHostUnregister(address)


def _take_pending_error() -> int | None:
    """Clear the error that the CUDA runtime keeps after a call that it refused.

    Torch would raise it at its next call, at a place that has nothing to do with it. Torch's own
    binding lacks the function, so it is looked up in the runtime that torch has loaded.

    Returns:
        The error; None where no runtime is loaded.
    """
    for name in _loaded_runtimes():
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return int(library.cudaGetLastError())
        except (OSError, AttributeError):
            continue
    return None


def _loaded_runtimes() -> list[str]:
    """Return the paths of the CUDA runtime libraries that this process has mapped."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if "libcudart" in line}
        return sorted(paths)
    return []


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
