"""The linker in a real SGLang. Run by `make test-sglang`, never by `make test`."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sglang.engines import set_environment

set_environment()  # before anything imports torch, which reads it once

from tests.sglang.worlds import Pair, opened_pair  # noqa: E402
from tests.vllm.models import made_models  # noqa: E402
from tests.vllm.processes import ROOT, Owner  # noqa: E402


def pytest_report_header() -> str:
    """Which releases meet here."""
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("sglang", "torch", "transformers")
    ]
    return f"python {sys.version.split()[0]}, " + ", ".join(versions)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests have recorded."""
    terminalreporter.section("figures")
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")


@pytest.fixture(scope="session")
def models() -> Path:
    """The directory of the tiny models."""
    return made_models(ROOT / ".vllm")


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    """Of the processes of one test."""
    with Owner(tmp_path) as owner:
        yield owner


@pytest.fixture(scope="module")
def pair_of(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Pair]]:
    """Two engines at one sidecar, by model; they take most of a minute to start, so a module has
    one pair at a time.
    """
    opened: dict[str, Pair] = {}

    def pair(model: str) -> Pair:
        if model not in opened:
            for other in opened.values():
                other.owner.__exit__(None, None, None)
            opened.clear()
            opened[model] = opened_pair(tmp_path_factory.mktemp(model), models, model)
        return opened[model]

    yield pair
    for other in opened.values():
        other.owner.__exit__(None, None, None)
