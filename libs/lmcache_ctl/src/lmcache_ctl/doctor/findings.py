"""The doctor's findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from lmcache_ctl.output import print_text


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        check: Name of the check, for example `clock`.
        where: A service, a file or a host.
        fix: How to fix it; "" if nothing is wrong.
    """

    level: Level
    check: str
    where: str
    what: str
    fix: str = ""


class Subject(NamedTuple):
    """Creates the findings of one check at one place."""

    check: str
    where: str

    def ok(self, what: str) -> Finding:
        """Report that all is well."""
        return Finding(Level.OK, self.check, self.where, what)

    def note(self, what: str, fix: str = "") -> Finding:
        """Report something worth knowing."""
        return Finding(Level.NOTE, self.check, self.where, what, fix)

    def warning(self, what: str, fix: str) -> Finding:
        """Report what will, or may, stop the cluster or a part of it."""
        return Finding(Level.WARNING, self.check, self.where, what, fix)

    def error(self, what: str, fix: str) -> Finding:
        """Report what stops the cluster or a part of it."""
        return Finding(Level.ERROR, self.check, self.where, what, fix)


class Diagnosis(msgspec.Struct, frozen=True):
    """All findings.

    Attributes:
        num_errors: Faults that stop the cluster, or a part of it.
        num_warnings: Faults that will, or may.
        findings: In the order of the checks, worst first within each.
    """

    num_errors: int
    num_warnings: int
    findings: list[Finding]


def diagnosis_of(findings: Sequence[Finding]) -> Diagnosis:
    """Sort findings, and count errors and warnings."""
    checks = list(dict.fromkeys(one.check for one in findings))
    badness = list(Level)[::-1]
    ordered = sorted(findings, key=lambda one: (checks.index(one.check), badness.index(one.level)))
    count = Counter(one.level for one in findings)
    return Diagnosis(count[Level.ERROR], count[Level.WARNING], ordered)


def print_diagnosis(found: Diagnosis) -> None:
    """Print each fault with its fix; only count the checks that passed."""
    for one in found.findings:
        if one.level is not Level.OK:
            print_text(f"{one.level:<8}{one.check}, {one.where}: {one.what}")
            if one.fix:
                print_text(f"        -> {one.fix}")
    fine = Counter(one.check for one in found.findings if one.level is Level.OK)
    if fine:
        passed = ", ".join(f"{check} ({number})" for check, number in fine.items())
        print_text(f"Passed: {passed}.")
    errors, warnings = found.num_errors, found.num_warnings
    print_text(f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}.")
