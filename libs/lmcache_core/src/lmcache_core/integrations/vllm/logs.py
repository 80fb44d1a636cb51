"""Where this library's log lines go inside vLLM."""

from __future__ import annotations

import logging


def log_as(theirs: logging.Logger, ours: logging.Logger) -> None:
    """Send what `ours` logs to where the lines of `theirs` go, in the same form and from the same
    level on, unless somebody has said already where it goes.

    vLLM gives handlers to its own logger alone. Of a library that has none Python prints warnings
    without time or process, and nothing
    below: an operator would not see that a sidecar is back.
    """
    if ours.hasHandlers():
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    if theirs.handlers and not ours.level:
        ours.setLevel(theirs.level)
