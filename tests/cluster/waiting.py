"""Wait within bounds, and print the reason."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

POLL_S = 2.0
REPORT_EVERY_S = 10.0
START_TIMEOUT_S = 900
DELETE_TIMEOUT_S = 600
"""Kubernetes deletes a namespace minutes after its last pod if one had a long grace period."""
LIST_ALL_S = 10.0
"""Pause between two lists of all objects."""
REVIEW_S = 0.5
"""Pause between two reviews of a pod."""
ENFORCED_S = 30.0
"""Time in which a new NetworkPolicy holds."""
ANNOUNCED_S = 5.0
"""Time after which other pods know what was stored."""


class ClusterError(Exception):
    """The cluster is not as the suite needs it; the message says what was seen."""


class NotInTimeError(ClusterError):
    """Something that was waited for has not happened."""


def progress(text: str) -> None:
    """Print a line that is visible while the suite runs."""
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
        missing: Returns what is still missing; "" or an exception ends the wait.
        what: The awaited state, for progress and the error.
        timeout_s: Limit on the whole wait.
        poll_s: Pause between two calls of `missing`.
        report_every_s: How often a line of progress is printed.

    Raises:
        NotInTimeError: Something is still missing after `timeout_s`.
    """
    begin = reported = time.monotonic()
    while text := missing():
        now = time.monotonic()
        if now - begin >= timeout_s:
            raise NotInTimeError(f"{what}: still missing after {timeout_s:g} s: {text}")
        if now - reported >= report_every_s:
            progress(f"{what} ({now - begin:.0f} of {timeout_s:g} s): {text}")
            reported = now
        time.sleep(poll_s)
