"""A training run whose starter is killed: nobody is left to stop it, so it stops by itself and
keeps what it has.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.fixtures.training_child import BEGUN, LIMIT_S, NUM_STEPS

TIMEOUT_S = 60.0


def read_until(stream: int, mark: bytes | None) -> bytes:
    """What comes out of a pipe up to a mark; None: until no process holds its other end."""
    assert TIMEOUT_S < LIMIT_S
    deadline, found = time.monotonic() + TIMEOUT_S, b""
    while mark is None or mark not in found:
        ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, found.decode(errors="replace")
        data = os.read(stream, 1 << 16)
        if not data:
            assert mark is None, found.decode(errors="replace")
            return found
        found += data
    return found


def test_a_run_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fixtures.training_child", str(tmp_path)]
    starter = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        assert starter.stderr is not None
        with starter.stderr as log:
            read_until(log.fileno(), BEGUN.encode())
            assert not list(tmp_path.iterdir())
            starter.kill()
            starter.wait()
            read_until(log.fileno(), None)
    finally:
        starter.kill()
        starter.wait()
    [checkpoint] = tmp_path.iterdir()
    step = torch.load(checkpoint, weights_only=True)["progressed"]["step"]
    assert 1 <= step < NUM_STEPS
