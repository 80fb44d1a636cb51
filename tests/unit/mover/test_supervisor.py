"""The supervisor: a sidecar sees the end of its connection only when the worker is dead."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.waiting import wait_until

HANG_S = 60.0


class Supervisor:
    """A real one, with one connection."""

    def __init__(self, path: Path) -> None:
        self.path = path
        command = [sys.executable, "-m", "lmcache_mover", "--socket", str(path)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.connection = self.connect()

    def connect(self) -> socket.socket:
        """Return a new connection; wait until its worker lives."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(HANG_S)
        assert self.process.stderr is not None
        while True:
            try:
                connection.connect(str(self.path))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                assert self.process.poll() is None
        line = self.process.stderr.readline()
        while "worker=" not in line or "ended" in line:
            line = self.process.stderr.readline()
        self.worker = int(line.rpartition("=")[2])
        return connection

    def is_worker_dead(self) -> bool:
        """Return whether the worker has ended, and was waited for by its parent or by init."""
        try:
            state = Path(f"/proc/{self.worker}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX"


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path / "socket")
    yield made
    made.connection.close()
    made.process.kill()
    made.process.wait()
    assert made.process.stderr is not None
    made.process.stderr.close()


def test_a_stopped_worker_is_dead_before_the_connection_ends(supervisor: Supervisor) -> None:
    os.kill(supervisor.worker, signal.SIGSTOP)
    supervisor.connection.shutdown(socket.SHUT_WR)
    assert supervisor.connection.recv(1) == b""
    assert supervisor.is_worker_dead()


def test_the_next_connection_gets_a_new_worker(supervisor: Supervisor) -> None:
    first = supervisor.worker
    os.kill(first, signal.SIGKILL)
    assert supervisor.connection.recv(1) == b""
    supervisor.connection.close()
    supervisor.connection = supervisor.connect()
    assert supervisor.worker != first


def test_a_worker_does_not_outlive_its_supervisor(supervisor: Supervisor) -> None:
    os.kill(supervisor.worker, signal.SIGSTOP)
    supervisor.process.kill()
    assert supervisor.connection.recv(1) == b""
    wait_until(supervisor.is_worker_dead)  # its memory is unmapped before its socket is closed


def test_sigterm_ends_both(supervisor: Supervisor) -> None:
    supervisor.process.terminate()
    assert supervisor.process.wait(HANG_S) == 0
    assert supervisor.connection.recv(1) == b""
    assert supervisor.is_worker_dead()


def test_a_request_that_makes_no_sense_ends_the_worker(supervisor: Supervisor) -> None:
    supervisor.connection.send(b"\xc1")
    assert supervisor.connection.recv(1) == b""


def test_a_place_that_cannot_be_listened_on_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "socket"
    command = [sys.executable, "-m", "lmcache_mover", "--socket", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 2
    assert f"--socket={path}: No such file or directory" in done.stderr
