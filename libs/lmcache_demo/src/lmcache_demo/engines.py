"""The demo's side of an engine process."""

from __future__ import annotations

import select
import subprocess
from pathlib import Path

import msgspec

from lmcache_demo.engine_messages import (
    Answer,
    AskBlended,
    Attach,
    BlendedAnswers,
    KeepDocuments,
    Prompt,
)
from lmcache_demo.processes import DemoError, Process, Processes

READY_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 120.0


class Engine:
    """An engine in a process of its own, which begins to load its model at once; `attach` comes
    before the first `ask`.

    Args:
        processes: Owner of the process.
        name: For messages and the log.
    """

    def __init__(self, processes: Processes, name: str) -> None:
        self._process: Process = processes.start(
            name, "lmcache_demo.engine_worker", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def attach(self, socket: Path | None) -> None:
        """Tell it its sidecar, and wait until it is ready. It may be told another one later.

        Args:
            socket: The sidecar's; None for no cache.

        Raises:
            DemoError: It ended, or was not ready in time.
        """
        self._tell(Attach(None if socket is None else str(socket)))
        self._line(READY_TIMEOUT_S)

    def ask(self, prompt: Prompt) -> Answer:
        """Let it generate.

        Raises:
            DemoError: It ended, or did not answer in time.
        """
        self._tell(prompt)
        return msgspec.json.decode(self._line(ANSWER_TIMEOUT_S), type=Answer)

    def keep_documents(self, message: KeepDocuments) -> int:
        """Let it store the documents of the blended prompts; returns their tokens.

        Raises:
            DemoError: It ended, or did not answer in time.
        """
        self._tell(message)
        return msgspec.json.decode(self._line(ANSWER_TIMEOUT_S), type=int)

    def ask_blended(self, message: AskBlended) -> BlendedAnswers:
        """Let it certify a way to blend, and answer.

        Raises:
            DemoError: It ended, or did not answer in time.
        """
        self._tell(message)
        return msgspec.json.decode(self._line(ANSWER_TIMEOUT_S), type=BlendedAnswers)

    def end(self) -> None:
        """End the process."""
        self._process.end()

    def _tell(self, message: Attach | Prompt | KeepDocuments | AskBlended) -> None:
        stdin = self._process.process.stdin
        assert stdin is not None
        try:
            stdin.write(msgspec.json.encode(message) + b"\n")
            stdin.flush()
        except BrokenPipeError as exc:
            raise DemoError(f"{self._process.name} has ended:\n{self._process.tail()}") from exc

    def _line(self, timeout_s: float) -> bytes:
        stdout = self._process.process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], timeout_s)
        line: bytes = stdout.readline() if ready else b""
        if not line:
            raise DemoError(
                f"{self._process.name} gave no answer within {timeout_s:.0f}"
                f" s:\n{self._process.tail()}"
            )
        return line
