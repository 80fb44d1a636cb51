"""A worker whose device is not the first: none of its threads may make a context on the first one,
which would take some 0.5 GB of it for every rank of a node.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

from tests.gpu.report import Report, WrongBytes
from tests.gpu.streams import run_world
from tests.gpu.wrong_bytes import WRONG_BYTES

NUM_STEPS = 200


def main() -> int:
    """Store and load on the second device; in a dry run on the CPU."""
    path, device = sys.argv[1:]
    report = Report(Path(path), "streams", device)
    if not report.is_dry:
        torch.cuda.set_device(1)  # as vLLM's workers do
        device = "cuda:1"
    try:
        run_world(report, "whole prompts", device, 0, NUM_STEPS)
    except WrongBytes as exc:
        print(exc, file=sys.stderr)
        return WRONG_BYTES
    have_contexts = [not report.is_dry and has_context(index) for index in range(2)]
    if have_contexts != [False, not report.is_dry]:
        raise AssertionError(f"contexts on the first two devices: {have_contexts}")
    report.note("second device", have_contexts=have_contexts)
    return 0


def has_context(index: int) -> bool:
    """Return whether this process has a primary context on a device. Makes none."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    codes = [
        driver.cuDeviceGet(ctypes.byref(device), index),
        driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active)),
    ]
    if any(codes):
        raise OSError(f"libcuda.so.1 answers {codes}")
    return bool(is_active.value)


if __name__ == "__main__":
    sys.exit(main())
