"""How a pool of workers ends: each case in a process of its own, since a pool belongs to one that has no threads."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import signal, sys, time
from lmcache_servicekit.workers import WorkerPool

def serve(seat, ready):
    if {serve!r} == "cannot start":
        return 7 if seat.number == 1 else time.sleep(60)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if {serve!r} == "deaf" else lambda *_: sys.exit(0))
    ready()
    time.sleep(60)
    return 0

print(WorkerPool(2, serve, lambda: print("ready", flush=True), 0.0).run(), flush=True)
"""


def started(serve: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT.format(serve=serve)], stdout=subprocess.PIPE, text=True)


def test_a_worker_that_cannot_start_ends_them_all_with_its_code() -> None:
    with started("cannot start") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "7\n"
        assert process.wait(20) == 0


@pytest.mark.parametrize(("serve", "signals", "code"), [("well", 1, 0), ("deaf", 2, 128 + signal.SIGTERM)])
def test_signals(serve: str, signals: int, code: int) -> None:
    with started(serve) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == f"{code}\n"
        assert process.wait(20) == 0
