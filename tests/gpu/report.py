"""What a part has found: one JSON line each, written at once, so that a part that is killed keeps
what it has.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.bench.measure import Figure


class WrongBytes(AssertionError):
    """Something came back that was not stored."""


@dataclass(frozen=True)
class Report:
    """Where one part writes.

    Attributes:
        path: File of JSON lines; appended to.
        part: Name of the part.
        device: `cuda`, or `cpu` in a dry run.
    """

    path: Path
    part: str
    device: str

    @property
    def is_dry(self) -> bool:
        """Whether there is no GPU: sizes are small, and figures mean nothing."""
        return self.device == "cpu"

    def note(self, name: str, **facts: Any) -> None:
        """Write a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": self.part, "name": name, **facts}) + "\n")

    def figure(self, figure: Figure) -> None:
        """Write a rate and its share of its limit."""
        self.note(
            figure.name,
            rate=round(figure.rate, 3),
            unit="GB/s",
            share=None if figure.share is None else round(figure.share, 3),
        )

    def equal(self, name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        """Compare bytes, where `got` is.

        Raises:
            WrongBytes: They differ.
        """
        if not torch.equal(as_bytes(got), as_bytes(wanted).to(got.device)):
            raise WrongBytes(f"{name}: other bytes came back")
        self.note(name, checked_bytes=wanted.nbytes)

    def copying(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[int], None]:
        """Return what copies one tensor to another and waits for the device, to be timed."""

        def work(turn: int) -> None:
            target.copy_(source, non_blocking=True)
            self.wait()

        return work

    def wait(self) -> None:
        """Wait for the device."""
        if not self.is_dry:
            torch.cuda.synchronize()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines; a last one that was cut off is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines
