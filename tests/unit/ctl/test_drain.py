"""How drains that are watched end, and what a cancellation tells."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import pytest
from lmcache_ctl import drain
from lmcache_ctl.asking import Asker, Caller
from lmcache_ctl.cli import main
from lmcache_ctl.errors import CtlError
from lmcache_ctl.services import Endpoint, Kind
from lmcache_ctl.states import DrainStatus

STORAGE = Endpoint(Kind.STORAGE, "storage-0", "http://storage-0")


def progress(state: str) -> dict[str, Any]:
    figures = dict.fromkeys(("total", "handed_over", "already_elsewhere", "failed", "left"), 0)
    return {"draining": state != "serving", "drain": {"state": state, **figures}}


class Scripted:
    """A service that gives these answers in turn, and the caller of it."""

    def __init__(self, *answers: dict[str, Any] | CtlError) -> None:
        self._answers: Iterator[dict[str, Any] | CtlError] = iter(answers)
        self.service = STORAGE

    async def one(self, _: Endpoint, question: Callable[[Scripted], Awaitable[Any]]) -> Any:
        return await question(self)

    async def ask(self, _method: str, _path: str) -> Any:
        answer = next(self._answers)
        if isinstance(answer, CtlError):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("last", "problem"), [("done", ""), ("serving", "the drain was cancelled")]
)
def test_a_watched_drain_ends_when_it_is_done_or_cancelled(
    last: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "POLL_S", 0.0)
    asker = cast(Asker, Scripted(progress("writing"), progress("handing_over"), progress(last)))
    outcome = asyncio.run(drain._drained(asker, STORAGE, 60.0, lambda *_: None))
    assert (outcome.drain is not None and outcome.drain.state, outcome.problem) == (last, problem)


def test_a_watched_drain_outlasts_silences_that_are_not_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drain, "POLL_S", 0.0)
    silences = [CtlError("no answer")] * (drain.MAX_UNANSWERED - 1)
    answers = [progress("writing"), *silences, progress("writing"), *silences, progress("done")]
    asker = cast(Asker, Scripted(*answers))
    outcome = asyncio.run(drain._drained(asker, STORAGE, 60.0, lambda *_: None))
    assert outcome.problem == ""
    assert outcome.drain is not None
    assert outcome.drain.state == "done"


def test_a_watched_drain_ends_at_silences_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "POLL_S", 0.0)
    silences = [CtlError("no answer")] * drain.MAX_UNANSWERED
    asker = cast(Asker, Scripted(progress("writing"), *silences))
    outcome = asyncio.run(drain._drained(asker, STORAGE, 60.0, lambda *_: None))
    assert "no answer" in outcome.problem


@pytest.mark.parametrize(
    ("figure", "code"), [("handed_over", 0), ("already_elsewhere", 0), ("failed", 1), ("left", 1)]
)
def test_a_drain_that_leaves_or_loses_chunks_is_a_failure(
    figure: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def drained(*_: object) -> drain.DrainOutcome:
        figures: dict[str, int] = progress("done")["drain"] | {"total": 1, figure: 1}
        return drain.DrainOutcome("storage", "storage-0", DrainStatus(**figures))

    def meant(*_: object) -> list[tuple[Endpoint, str | None]]:
        return [(STORAGE, None)]

    monkeypatch.setattr(drain, "_drained", drained)
    monkeypatch.setattr(drain, "_meant", meant)
    with pytest.raises(SystemExit) as ended:
        main(["drain", "storage/storage-0", "--storage-url", "http://127.0.0.1:1"])
    assert ended.value.code == code, capsys.readouterr()


@pytest.mark.parametrize(
    ("before", "told"), [("writing", "takes chunks"), ("serving", "was not draining")]
)
def test_undrain_tells_whether_there_was_a_drain(before: str, told: str) -> None:
    caller = cast(Caller, Scripted(progress(before), progress("serving")))
    assert drain._takes(asyncio.run(drain._undrained(caller))) == told


def test_a_peer_is_named_in_a_path_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is one segment, whatever it contains."""
    paths: list[str] = []

    class Noting(Scripted):
        async def ask(self, _method: str, path: str) -> Any:
            paths.append(path)
            return await super().ask(_method, path)

    monkeypatch.setattr(drain, "POLL_S", 0.0)
    asker = cast(Asker, Noting(progress("writing"), progress("done")))
    asyncio.run(drain._drained(asker, STORAGE, 60.0, lambda *_: None, "a/../b?c#d"))
    assert paths == ["/v1/admin/peers/a%2F..%2Fb%3Fc%23d:drain", "/v1/peers/a%2F..%2Fb%3Fc%23d"]
