"""How drains that are watched end, and what a cancellation says: the command, and a service that
gives the answers of a script.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from lmcache_ctl import drain
from lmcache_ctl.drain import MAX_UNANSWERED

from tests.fixtures.ctl import Ctl
from tests.fixtures.http_server import Handler, served

FIGURES = ("total", "handed_over", "already_elsewhere", "failed", "left")
SILENT = None
"""An answer that is an error."""


def progress(state: str, **figures: int) -> dict[str, Any]:
    found = dict.fromkeys(FIGURES, 0) | figures
    return {"draining": state != "serving", "drain": {"state": state, **found}}


NAMED = {"instance": "storage-0"}
"""What a service is asked first."""
WRITING, DONE, SERVING = progress("writing"), progress("done"), progress("serving")


PAUSE = [SILENT] * (MAX_UNANSWERED - 1)


class Service(Handler):
    """A service, or a broker, with these answers to drains and to questions about them."""

    answers: ClassVar[Iterator[dict[str, Any] | None]]
    paths: ClassVar[list[str]]

    def do_GET(self) -> None:
        if self.path == "/healthz":
            self.answer(200, {"status": "ok"})
            return
        self.paths.append(self.path)
        answer = next(self.answers)
        if answer is SILENT:
            self.answer(503, {"detail": "cannot be asked"})
        else:
            self.answer(200, answer)

    do_POST = do_GET


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(drain, "POLL_S", 0.0)
    monkeypatch.setattr(Service, "paths", [], raising=False)
    with served(Service) as url:
        yield url


def script(monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any] | None) -> None:
    monkeypatch.setattr(Service, "answers", iter(answers), raising=False)


def at(url: str) -> str:
    return f"storage/{url.partition('//')[2]}"


@pytest.mark.parametrize(
    ("answers", "state", "problem"),
    [
        ([WRITING, progress("handing_over"), DONE], "done", ""),
        ([WRITING, SERVING], "serving", "the drain was cancelled"),
        ([WRITING, *PAUSE, WRITING, *PAUSE, DONE], "done", ""),
        ([WRITING, *[SILENT] * MAX_UNANSWERED], "writing", "it has ended, or cannot be asked"),
        ([progress("done", total=1, handed_over=1)], "done", ""),
        ([progress("done", total=1, already_elsewhere=1)], "done", ""),
    ],
    ids=["done", "cancelled", "silences apart", "silences in a row", "handed over", "elsewhere"],
)
def test_a_watched_drain_ends(
    answers: list[dict[str, Any] | None],
    state: str,
    problem: str,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script(monkeypatch, NAMED, *answers)
    [found] = Ctl([f"--storage-url={url}"]).json("drain", at(url), code=problem != "")
    assert found["drain"]["state"] == state
    assert problem in found["problem"]
    assert bool(problem) == bool(found["problem"])


@pytest.mark.parametrize("figure", ["failed", "left"])
def test_a_drain_that_leaves_or_loses_chunks_is_a_failure(
    figure: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, NAMED, progress("done", total=1, **{figure: 1}))
    [found] = Ctl([f"--storage-url={url}"]).json("drain", at(url), code=1)
    assert found["problem"] == ""


@pytest.mark.parametrize(
    ("before", "said"), [(WRITING, "takes chunks"), (SERVING, "was not draining")]
)
def test_undrain_says_whether_there_was_a_drain(
    before: dict[str, Any], said: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, NAMED, before, SERVING)
    assert said in Ctl([f"--storage-url={url}"]).text("undrain", at(url))


def test_the_name_of_a_peer_is_one_segment_of_a_path(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it contains."""
    script(monkeypatch, WRITING, DONE)
    Ctl([f"--broker-url={url}"]).text("drain", "peer/a/../b?c#d")
    assert Service.paths == [
        "/v1/admin/peers/a%2F..%2Fb%3Fc%23d:drain",
        "/v1/peers/a%2F..%2Fb%3Fc%23d",
    ]
