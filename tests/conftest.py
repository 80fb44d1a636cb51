"""What holds for every test process: how many there are, their threads, their signals."""

from __future__ import annotations

import os
import signal

import pytest

MAX_PROCESSES = 4

# Processes share the cores already: threads that wait for each other at every operator only take them from the others.
# Before torch is imported, and for all processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A background job, nohup and some CI runners start programs with SIGINT ignored, and their children
# inherit that. Tests that interrupt a child need the default, whatever started the tests.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)  # vLLM's environment has no such plugin
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors: tests of processes and sockets wait for each other more than they compute."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)) + 1)
