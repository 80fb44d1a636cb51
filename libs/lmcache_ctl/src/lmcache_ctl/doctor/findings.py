"""What the doctor finds."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

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
        level: How bad it is.
        check: What was checked, for example `clock`.
        where: At whom: a service, a file, a host.
        what: What was found.
        fix: What to do about it; "" where nothing is to be done.
    """

    level: Level
    check: str
    where: str
    what: str
    fix: str = ""


class Diagnosis(msgspec.Struct, frozen=True):
    """All that was found.

    Attributes:
        num_errors: What keeps the cluster, or a part of it, from its work.
        num_warnings: What will, or may.
        findings: In the order of the checks, worst first within each.
    """

    num_errors: int
    num_warnings: int
    findings: list[Finding]


def diagnosis_of(findings: Sequence[Finding]) -> Diagnosis:
    """The findings in order, and how bad they are together."""
    checks = list(dict.fromkeys(one.check for one in findings))
    badness = list(Level)[::-1]
    ordered = sorted(findings, key=lambda one: (checks.index(one.check), badness.index(one.level)))
    count = [one.level for one in findings].count
    return Diagnosis(count(Level.ERROR), count(Level.WARNING), ordered)


def print_diagnosis(found: Diagnosis) -> None:
    """What is wrong, each with what to do about it; checks that passed are only counted."""
    fine = [one for one in found.findings if one.level is Level.OK]
    for one in found.findings:
        if one.level is not Level.OK:
            print_text(f"{one.level:<8}{one.check}, {one.where}: {one.what}")
            if one.fix:
                print_text(f"        -> {one.fix}")
    by_check = {
        check: sum(one.check == check for one in fine)
        for check in dict.fromkeys(one.check for one in fine)
    }
    if by_check:
        print_text(
            "Passed: "
            + ", ".join(f"{check} ({number})" for check, number in by_check.items())
            + "."
        )
    print_text(f"{_counted(found.num_errors, 'error')}, {_counted(found.num_warnings, 'warning')}.")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
