"""A process that answers each line of its input with a line of JSON."""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ANSWER_TIMEOUT_S = 300.0
END_TIMEOUT_S = 10.0


class Child:
    """Such a process; it ends with the `with` block.

    Args:
        environment: Of the process; None: this one's.
        log: File for what it writes to standard error; None: it goes where this one's goes.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self._log = log
        output = None if log is None else log.open("ab")
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output
        )
        if output is not None:
            output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let it end by itself, or kill it if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def send(self, line: str) -> None:
        """Ask, without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Return the next answer.

        Raises:
            RuntimeError: The process has ended, or does not answer in time.
        """
        stdout = self._process.stdout
        assert stdout is not None
        is_readable, _, _ = select.select([stdout], [], [], timeout_s)
        line = stdout.readline() if is_readable else b""
        if not line:
            what = "has ended" if is_readable else f"does not answer in {timeout_s:g} s"
            tail = "" if self._log is None else self._log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{self._process.args} {what}:\n{tail}")
        return json.loads(line)

    def ask(self, line: str) -> Any:
        """Return the answer to a line."""
        self.send(line)
        return self.answer()
