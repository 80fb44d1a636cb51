"""What reaches a terminal."""

from __future__ import annotations

from collections import Counter

import pytest
from lmcache_ctl.cluster.services import Kind
from lmcache_ctl.cluster.states import ServiceState, State
from lmcache_ctl.output import print_table, print_text
from lmcache_ctl.top.commands import print_moment
from lmcache_ctl.top.rates import moment

EVIL = "a\x1b]0;title\x07b\x9b2Jc\rd[red]e"


def test_what_a_service_says_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_text(EVIL)
    print_table("", ("of", "what"), [(EVIL, "x")], left=2)
    state = ServiceState(Kind.LOOKUP, EVIL, "http://h", State.OK, problem=EVIL)
    print_moment(moment([state], [state], 1.0))
    shown = capsys.readouterr().out
    assert not set("\x1b\x07\x9b\r") & set(shown)
    assert shown.count("a?]0;title?b?2Jc?d[red]e") == 4


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_narrow_terminal_gets_all_of_it_and_colours_only_where_they_are_wanted(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    cells = ("demo-lmcache-lookup-7d9f8b6c5-x2x4z", "no answer", "it hangs, or the network drops what is sent to it")
    print_table("", ("name", "state", "why"), [cells], left=2, prose=True)
    shown = capsys.readouterr().out
    assert "\x1b[3" not in shown
    plain = shown.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert sorted(set(plain) - set(" \n\u2500")) == sorted(set("namestatewhy" + "".join(cells)) - {" "})
    assert Counter(plain)["-"] == cells[0].count("-")
    assert Counter(plain)["x"] == cells[0].count("x"), "the end of the name is there"
    assert max(len(line) for line in plain.splitlines()) <= columns
