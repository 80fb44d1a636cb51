"""What `lmcachectl certify` prints for people."""

from __future__ import annotations

from lmcache_ctl.certify.gate import Certificate
from lmcache_ctl.output import UNKNOWN, error_text, print_table, print_text, ratio_text


def print_certificate(found: Certificate) -> None:
    """A line for each profile, then why those that failed did."""
    title = f"{found.source}: {found.num_tokens} tokens; lmcache-core {found.core_version}, {found.machine}"
    rows = []
    for verdict in found.verdicts:
        measured = verdict.measurement
        cells = (UNKNOWN, UNKNOWN) if measured is None else (ratio_text(measured.ratio), error_text(measured.rms_relative))
        rows.append((verdict.profile, "passed" if verdict.has_passed else "FAILED", *cells))
    print_table(title, ("profile", "", "ratio", "rms error"), rows, left=2)
    for verdict in found.verdicts:
        for reason in verdict.reasons:
            print_text(f"{verdict.profile}: {reason}")
