"""How a pool of workers ends: each case in a process of its own, since a pool belongs to one
that has no threads.
"""

from __future__ import annotations

import signal
import subprocess
import sys

SCRIPT = """
import os, signal, sys, time
from lmcache_servicekit.workers import WorkerPool

def serve(seat, ready):
    if {serve!r} == "cannot start":
        return 7 if seat.number == 1 else time.sleep(60)
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"deaf\\n") if {serve!r} == "deaf" else sys.exit(0))
    ready()
    while True:
        time.sleep(60)

print(WorkerPool(2, serve, lambda: print("ready", flush=True), 0.0).run(), flush=True)
"""  # noqa: E501


def started(serve: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(serve=serve)], stdout=subprocess.PIPE, text=True
    )


def test_a_worker_that_cannot_start_ends_them_all_with_its_code() -> None:
    with started("cannot start") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "7\n"
        assert process.wait(20) == 0


def test_a_signal_ends_them_gracefully() -> None:
    with started("well") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "0\n"
        assert process.wait(20) == 0


def test_a_second_signal_ends_them_at_once() -> None:
    with started("deaf") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        # Both workers have been told by now, and do nothing.
        assert [process.stdout.readline() for _ in range(2)] == ["deaf\n"] * 2
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == f"{128 + signal.SIGTERM}\n"
        assert process.wait(20) == 0
