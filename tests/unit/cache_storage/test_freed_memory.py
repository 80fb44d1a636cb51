"""Memory that a process frees: kept, within a bound, if the process asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource
from lmcache_storage.app import KEPT_BYTES, keep_freed_memory
if {is_asked}:
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
pieces = [bytes(500_000) for _ in range(4)]
del pieces
before = faults()
for _ in range(200):
    pieces = [b"x" * 500_000 for _ in range(4)]
    del pieces
print(faults() - before)
held = [None] * 200  # below the pieces: what lies above them keeps them in the process
at_rest = resident()
for place in range(200):
    held[place] = b"x" * 500_000
held.clear()
assert resident() - at_rest < KEPT_BYTES + (2 << 20)
"""


@pytest.mark.parametrize("is_asked", [False, True])
def test_pieces_of_bodies_use_memory_again(is_asked: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(is_asked=is_asked)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    num_faults = int(done.stdout)
    pages = 200 * 4 * 500_000 // 4096
    assert (num_faults < pages / 20) is is_asked, f"{num_faults} of {pages} pages"
