"""What reaches a terminal."""

from __future__ import annotations

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
