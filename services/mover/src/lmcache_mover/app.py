"""The mover's supervisor: gives each connection of a sidecar a worker process, and kills it when
the connection ends.

The sidecar sees the end of its connection only after the worker is dead: the supervisor holds the
connection, too, and closes it last. If the supervisor is killed, the kernel kills its worker.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

logger = logging.getLogger(__name__)

SOCKET_MODE: Final = 0o660
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)


def main() -> int:
    """Run until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="lmcache-mover",
        description="Reads from other machines into the arena of a sidecar, which connects to it.",
    )
    parser.add_argument(
        "--socket", type=Path, required=True, help="Unix socket to listen on, for the sidecar alone"
    )
    parser.add_argument(
        "--version", action="version", version=f"lmcache-mover {version('lmcache-mover')}"
    )
    path: Path = parser.parse_args().socket
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        listener = _listener(path)
    except OSError as exc:
        print(f"--socket={path}: {exc.strerror or exc}", file=sys.stderr)
        return 2
    with listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                _serve(connection)


def _serve(connection: socket.socket) -> None:
    """Run a worker for a connection until one of the two ends; then the worker is dead."""
    worker = subprocess.Popen(  # noqa: S603 (this program)
        [sys.executable, "-m", "lmcache_mover.worker", str(connection.fileno())],
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
        preexec_fn=partial(_die_with, os.getpid()),
    )
    try:
        logger.info("sidecar connected: worker=%d", worker.pid)
        ended = os.pidfd_open(worker.pid)
        try:
            watch = select.poll()
            watch.register(ended, select.POLLIN)
            watch.register(connection, select.POLLRDHUP)
            watch.poll()
        finally:
            os.close(ended)
    finally:
        worker.kill()
        code = worker.wait()
    logger.info("worker ended: worker=%d code=%d", worker.pid, code)


def _die_with(supervisor: int) -> None:
    """Have the kernel kill this process when its supervisor ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


def _listener(path: Path) -> socket.socket:
    """Listen at a path, replacing the socket of an earlier mover."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_socket():
            path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(path))
        path.chmod(SOCKET_MODE)
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)
