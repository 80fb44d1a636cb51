"""A plugin of pytest for `tests.mutants`: notes which test executes which line of the product, and
how long each test takes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from coverage import Coverage

from tests.stats import product

FOLDER = Path(os.environ["MUTANTS_MAP"])
_coverage = Coverage(
    data_file=str(FOLDER / "coverage"),
    data_suffix=str(os.getpid()),
    include=[str(module.path) for module in product().values()],
    config_file=False,
)
_seconds: Counter[str] = Counter()


def pytest_configure() -> None:
    """Begin before the product is imported."""
    _coverage.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Attribute what is executed to the test."""
    _coverage.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        _coverage.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the time of a phase."""
    _seconds[report.nodeid] += report.duration


def pytest_unconfigure() -> None:
    """Write what was found."""
    _coverage.stop()
    _coverage.save()
    (FOLDER / f"seconds-{os.getpid()}.json").write_text(json.dumps(_seconds))
