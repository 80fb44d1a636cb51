"""Processes of the demo: started, awaited, killed; none outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

START_TIMEOUT_S = 180.0
"""A sidecar compiles its codecs first, where the installation has not: half a minute of two busy
processors.
"""
END_TIMEOUT_S = 10.0
POLL_S = 0.05
PR_SET_PDEATHSIG = 1
TAIL_LINES = 30


class DemoError(Exception):
    """Something is not as the demo says it is."""


class Process:
    """A child process with a log file.

    Args:
        name: For messages and the log's name.
        process: The running child.
        log: Where it writes.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL, and wait."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(END_TIMEOUT_S)

    def end(self) -> None:
        """Send SIGTERM, and SIGKILL if that takes longer than `END_TIMEOUT_S`."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def tail(self) -> str:
        """Return the end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


class Processes:
    """Owner of all processes of a run: `with Processes(directory) as processes:`.

    Args:
        directory: For logs and port files.
        environment: Environment of the children.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._environment = dict(environment)
        self._all: list[Process] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()

    @property
    def num_alive(self) -> int:
        """Children that still run."""
        return sum(process.is_alive for process in self._all)

    def start(self, name: str, module: str, arguments: Sequence[str] = (), **pipes: int) -> Process:
        """Run `python -m module` as a child that dies with this process.

        Args:
            name: For messages and the log's name.
            module: What to run.
            arguments: Its arguments.
            **pipes: `stdin`, `stdout` as in `subprocess.Popen`; by default neither is connected.
        """
        return self.start_command(name, [sys.executable, "-m", module, *arguments], **pipes)

    def start_command(self, name: str, command: Sequence[str], **pipes: int) -> Process:
        """Run a command as a child that dies with this process; see `start`."""
        log = self._directory / f"{name}.log"
        with log.open("wb") as output:
            child = subprocess.Popen(  # noqa: S603
                list(command),
                env=self._environment,
                stdin=pipes.get("stdin", subprocess.DEVNULL),
                stdout=pipes.get("stdout", output),
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        process = Process(name, child, log)
        self._all.append(process)
        return process

    def start_service(
        self, name: str, module: str, settings: Mapping[str, object]
    ) -> tuple[Process, dict[str, int]]:
        """Start a service and wait until it listens.

        Args:
            name: For messages and files.
            module: Its package.
            settings: Written to its settings file.

        Returns:
            The process and its ports, by name.

        Raises:
            DemoError: It ended, or did not listen in time; the text ends with its log.
        """
        config = self._directory / f"{name}.json"
        port_file = self._directory / f"{name}.ports"
        port_file.unlink(missing_ok=True)  # a process of that name that was killed has left its own
        config.write_text(json.dumps(settings, default=str), encoding="utf-8")
        process = self.start(name, module, ["--config", str(config), "--port-file", str(port_file)])
        deadline = time.monotonic() + START_TIMEOUT_S
        while not port_file.exists():
            if not process.is_alive:
                raise DemoError(
                    f"{name} ended with code {process.process.returncode}:\n{process.tail()}"
                )
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{name} did not listen within {START_TIMEOUT_S:.0f} s:\n{process.tail()}"
                )
            time.sleep(POLL_S)
        ports: dict[str, int] = json.loads(port_file.read_text(encoding="utf-8"))
        return process, ports

    def end_all(self) -> None:
        """End every child, newest first."""
        for process in self._all:
            with contextlib.suppress(ProcessLookupError):
                process.process.send_signal(signal.SIGTERM)
        for process in reversed(self._all):
            process.end()


def _die_with_parent() -> None:
    """Ask the kernel to kill this child when its parent dies, even by SIGKILL (Linux; elsewhere
    nothing happens).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
