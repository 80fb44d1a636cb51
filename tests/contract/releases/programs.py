"""The frozen clients and servers of a release, as processes."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

FOLDER = Path(__file__).parent
FROZEN = tuple(sorted(path for path in FOLDER.glob("frozen_*") if path.is_dir()))
TIMEOUT_S = 30.0


def command_of(program: Path, *arguments: object) -> list[str]:
    """Without what the environment of a test would let it import."""
    return [sys.executable, "-E", "-s", str(program), *map(str, arguments)]


def said_by(program: Path, *arguments: object) -> Any:
    """Run a client to its end; what it says came of it."""
    ended = subprocess.run(
        command_of(program, "client", *arguments), capture_output=True, timeout=TIMEOUT_S, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


class Program:
    """One that runs, and is told and asked by lines.

    Args:
        process: Of it.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def line(self) -> str:
        """The next line that it says."""
        output = _pipe(self._process.stdout)
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            assert selector.select(TIMEOUT_S), "it says nothing"
        return output.readline().strip()

    def ask(self, *call: object) -> Any:
        """Tell it a line, and read one."""
        into = _pipe(self._process.stdin)
        into.write(json.dumps(call) + "\n")
        into.flush()
        return json.loads(self.line())


@contextmanager
def running(program: Path, *arguments: object) -> Iterator[Program]:
    """A program that goes on until the end, and must not have complained of what it was told."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command_of(program, *arguments), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield Program(process)
        finally:
            process.terminate()
            _, complaints = process.communicate(timeout=TIMEOUT_S)
    assert not complaints, complaints


@contextmanager
def frozen_server(program: Path, *arguments: object) -> Iterator[str]:
    """A server that listens; what it says first."""
    with running(program, "server", *arguments) as process:
        yield process.line()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
