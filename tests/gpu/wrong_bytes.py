"""A plugin of pytest: it ends with a code of its own if a comparison of a check failed, rather than
a compiler, a library or the device.
"""

from __future__ import annotations

import traceback
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

WRONG_BYTES = 10
TORCH = Path(torch.testing.__path__[0])
_WRONG = "wrong_bytes"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note a failed comparison in the report, which other processes send to the first."""
    report = yield
    if call.excinfo is not None and is_comparison(call.excinfo.value, item.path.parent):
        report.user_properties.append((_WRONG, True))
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Choose the code of this run."""
    config.pluginmanager.register(_Code())


class _Code:
    def __init__(self) -> None:
        self._is_wrong = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._is_wrong |= (_WRONG, True) in map(tuple, report.user_properties)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._is_wrong:
            session.exitstatus = WRONG_BYTES


def is_comparison(exc: BaseException, checks: Path) -> bool:
    """Return whether an assertion in this directory, or in torch's comparisons, raised that."""
    if isinstance(exc, BaseExceptionGroup):
        return any(is_comparison(one, checks) for one in exc.exceptions)
    places = [Path(frame.filename) for frame in traceback.extract_tb(exc.__traceback__)[-1:]]
    return isinstance(exc, AssertionError) and any(
        place.parent == checks or place.is_relative_to(TORCH) for place in places
    )
