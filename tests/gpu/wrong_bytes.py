"""A plugin of pytest: it ends with a code of its own if a comparison of a check failed, rather than
a compiler, a library or the device.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch

WRONG_BYTES = 10
TORCH = Path(torch.testing.__path__[0])
_WRONG = pytest.StashKey[bool]()


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Note a failed comparison."""
    if call.excinfo is not None and is_comparison(call.excinfo.value, item.path.parent):
        item.session.stash[_WRONG] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Choose the code."""
    if session.stash.get(_WRONG, False):
        session.exitstatus = WRONG_BYTES


def is_comparison(exc: BaseException, checks: Path) -> bool:
    """Return whether an assertion in this directory, or in torch's comparisons, raised that."""
    if isinstance(exc, BaseExceptionGroup):
        return any(is_comparison(one, checks) for one in exc.exceptions)
    places = [Path(frame.filename) for frame in traceback.extract_tb(exc.__traceback__)[-1:]]
    return isinstance(exc, AssertionError) and any(
        place.parent == checks or place.is_relative_to(TORCH) for place in places
    )
