"""Wait within bounds, and say what is being waited for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

POLL_S = 2.0
REPORT_EVERY_S = 10.0


class ClusterError(Exception):
    """The cluster is not as the suite needs it; the message says what was seen."""


def progress(text: str) -> None:
    """Print a line that is seen while the suite runs."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def wait_until(
    missing: Callable[[], str],
    what: str,
    timeout_s: float,
    *,
    poll_s: float = POLL_S,
    report_every_s: float = REPORT_EVERY_S,
) -> None:
    """Poll until nothing is missing any more.

    Args:
        missing: Says what is still missing; "" ends the wait. What it raises ends the wait too.
        what: What is waited for, for progress and for the error.
        timeout_s: Limit on the whole wait.
        poll_s: Pause between two calls of `missing`.
        report_every_s: How often a line of progress is printed.

    Raises:
        ClusterError: Something is still missing after `timeout_s`.
    """
    begin = reported = time.monotonic()
    while text := missing():
        now = time.monotonic()
        if now - begin >= timeout_s:
            raise ClusterError(f"{what}: still missing after {timeout_s:g} s: {text}")
        if now - reported >= report_every_s:
            progress(f"{what} ({now - begin:.0f} of {timeout_s:g} s): {text}")
            reported = now
        time.sleep(poll_s)
