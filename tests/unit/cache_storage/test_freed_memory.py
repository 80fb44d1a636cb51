"""Memory that a process frees: kept, within a bound, if the process asks for it."""

from __future__ import annotations

import subprocess
import sys

FAULTS = """
import resource
from lmcache_storage.app import KEPT_BYTES, keep_freed_memory
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def faults_of_pieces():
    pieces = [bytes(500_000) for _ in range(4)]
    del pieces
    before = faults()
    for _ in range(200):
        pieces = [b"x" * 500_000 for _ in range(4)]
        del pieces
    return faults() - before
print(faults_of_pieces())
assert keep_freed_memory()
print(faults_of_pieces())
held = [None] * 200  # below the pieces: what lies above them keeps them in the process
at_rest = resident()
for place in range(200):
    held[place] = b"x" * 500_000
held.clear()
assert resident() - at_rest < KEPT_BYTES + (2 << 20)
"""


def test_pieces_of_bodies_use_memory_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=60
    )
    num_before, num_after = map(int, done.stdout.split())
    pages = 200 * 4 * 500_000 // 4096
    assert num_before >= pages / 20 > num_after, f"{num_before}, then {num_after} of {pages} pages"
