"""How many processes `-n auto` means."""

from __future__ import annotations

import os

import pytest

MAX_PROCESSES = 4


@pytest.hookimpl(optionalhook=True)  # vLLM's environment has no such plugin
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors: tests of processes and sockets wait for each other more than they compute."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)) + 1)
