"""`python -m tests.gpu --parts streams` notices if any of what orders copies and forward passes is
removed, also in a dry run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.gpu_connectors.staging import StagingPair
from lmcache_core.gpu_connectors.streams import LaunchedCopies
from lmcache_core.integrations.vllm.store_threads import StoreThreads
from lmcache_core.integrations.vllm.worker import WorkerSide

from tests.gpu import streams
from tests.gpu.copies import LOADS, STORES, require_pinned
from tests.gpu.report import Report, WrongBytes, read_lines

Method = Callable[..., Any]


def unordered(thread: str) -> Callable[[Method], Method]:
    """Let a thread's copies wait for no event."""

    def removed(near: Method) -> Method:
        def unordered_near(*args: Any) -> Any:
            *others, after = args
            return near(*others, None if threading.current_thread().name == thread else after)

        return unordered_near

    return removed


def answering(answer: object) -> Callable[[Method], Method]:
    """Answer without doing anything."""
    return lambda method: lambda *args: answer


def not_waiting(wait_for_first: Method) -> Method:
    """Take the first copy for one that has ended."""
    return lambda copies: copies.ended and copies.ended.popleft()


REMOVED: dict[str, tuple[type, str, Callable[[Method], Method]]] = {
    "stores begin after the forward pass": (StagingPair, "near", unordered(STORES)),
    "loads begin after what was launched before": (StagingPair, "near", unordered(LOADS)),
    "steps write after stores have read": (WorkerSide, "_write_behind_copies", answering(None)),
    "steps are told what they overwrite": (WorkerSide, "before_overwriting", answering(None)),
    "finished requests keep their blocks": (StoreThreads, "reads", answering(False)),
    "chunks and loads are reported after copies": (LaunchedCopies, "wait_for_first", not_waiting),
}
"""What is promised: the method that keeps it, and what takes the method's place."""


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "gpu.jsonl", "streams", "cpu")


def test_a_dry_run_passes_and_knows_what_is_pinned(report: Report) -> None:
    """Nothing but what the fake copy engines move."""
    streams.run(report)
    worlds = [line for line in read_lines(report.path) if "are_pinned" in line]
    assert len(worlds) == len(streams.WORLDS) + 1  # that of the second device
    for world in worlds:
        are_pinned = world["are_pinned"]
        if world["name"] in streams.BY_COPY_ENGINES:
            require_pinned(are_pinned)
            continue
        assert not any(are_pinned[thread] for thread in (STORES, LOADS))
        with pytest.raises(AssertionError, match="pinned memory"):
            require_pinned(are_pinned)


@pytest.mark.parametrize("promise", REMOVED)
def test_a_removal_is_noticed(
    promise: str, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, name, removed = REMOVED[promise]
    monkeypatch.setattr(kind, name, removed(getattr(kind, name)))
    with pytest.raises(WrongBytes, match="reads wrong KV"):
        streams.run(report)
