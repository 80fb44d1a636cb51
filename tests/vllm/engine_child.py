"""An engine in a process of its own: commands come as lines of JSON on its input, answers go to
its output in the same way.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.vllm.engines import Ask, Engine, be_unhurried, plain, set_environment


class Child:
    """What it does when told. Engines without a connector may be several, by name."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}

    def open(self, name: str, options: dict[str, Any]) -> None:
        """Make an engine."""
        self._engines[name] = Engine(options)

    def generate(self, name: str, asks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answer requests."""
        return [
            plain(answer) for answer in self._engines[name].generate([Ask(**ask) for ask in asks])
        ]

    def reset(self, name: str) -> None:
        """Forget the prefix cache."""
        self._engines[name].reset()

    def metrics(self, name: str) -> dict[str, float]:
        """The engine's figures."""
        return self._engines[name].metrics()

    def close(self) -> None:
        """End all engines."""
        while self._engines:
            self._engines.popitem()[1].close()


def serve(child: Child) -> None:
    """Obey until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log
    for line in sys.stdin:
        command = json.loads(line)
        method: Callable[..., Any] = getattr(child, command.pop("do"))
        answers.write(json.dumps({"answer": method(**command)}) + "\n")
        answers.flush()
    child.close()


if __name__ == "__main__":
    set_environment()
    be_unhurried()
    serve(Child())
