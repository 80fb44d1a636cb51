"""Says which files have been tested, a line each, where pytest prints a dot for each test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest


def file_of(nodeid: str) -> str:
    """Return the file of a test."""
    return nodeid.partition("::")[0]


class Progress:
    """A plugin of the process that reports to the terminal."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter
        self._left: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._num_files = 0

    def expect(self, nodeids: Iterable[str]) -> None:
        """Count the tests that are going to run. Every worker process collects all of them."""
        if not self._left:
            self._left.update(map(file_of, nodeids))
            self._num_files = len(self._left)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count what this process runs."""
        self.expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Count what worker processes run."""
        self.expect(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(
        self, report: pytest.CollectReport | pytest.TestReport
    ) -> tuple[str, str, str] | None:
        """Print no dot."""
        is_passed = report.when == "call" and report.passed and not hasattr(report, "wasxfail")
        return ("passed", "", "") if is_passed else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up what a file took."""
        self._seconds[file_of(report.nodeid)] += report.duration
        self._failed[file_of(report.nodeid)] += report.failed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Say that a file is done."""
        file = file_of(nodeid)
        self._left[file] -= 1
        if self._left[file]:
            return
        del self._left[file]
        number = self._num_files - len(self._left)
        failed = f", {self._failed[file]} FAILED" if self._failed[file] else ""
        self._reporter.ensure_newline()
        self._reporter.write_line(
            f"[{number}/{self._num_files}] {file} {self._seconds[file]:.1f} s{failed}"
        )
