"""This library's log lines among vLLM's."""

from __future__ import annotations

import logging


def log_as(theirs: logging.Logger, ours: logging.Logger) -> None:
    """Send the records of `ours` to the handlers of `theirs`, with the same format and level,
    unless `ours` is already configured.

    vLLM configures only its own logger. For a logger without handlers, Python prints warnings
    without time or process and drops everything below: an operator would not see that a sidecar has
    returned.
    """
    if ours.hasHandlers():
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    if theirs.handlers and not ours.level:
        ours.setLevel(theirs.level)


def log_as_vllm() -> None:
    """Do it for all of this library."""
    log_as(theirs=logging.getLogger("vllm"), ours=logging.getLogger("lmcache_core"))
