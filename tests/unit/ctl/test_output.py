"""What reaches a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from lmcache_ctl.drain import DrainOutcome, print_drains
from lmcache_ctl.output import print_table, print_text
from lmcache_ctl.services import Kind
from lmcache_ctl.states import DrainStatus, ServiceStatus, State, Tier, Traffic
from lmcache_ctl.status import print_status, summed

EVIL = "a\x1b]0;title\x07b\x9b2Jc\rd[red]e\udcff"


def test_what_a_service_says_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_text(EVIL)
    print_table(("of", "what"), [(EVIL, "x")], left=2)
    state = ServiceStatus(Kind.LOOKUP, EVIL, "http://h", State.OK, problem=EVIL)
    print_status(summed([state]))
    shown = capsys.readouterr().out
    assert not set("\x1b\x07\x9b\r\udcff") & set(shown)
    assert shown.count("a?]0;title?b?2Jc?d[red]e") == 5


POD = "cache-lmcache-llama-3-1-8b-7d9f8b6c5-x2x4z"
TIERS = [Tier("memory", 12_345, 3 << 30, 4 << 30), Tier("disk", 90, 3 << 30, 10 << 30)]


def busy(growth: int) -> ServiceStatus:
    """A sidecar of a pod as the chart names it."""
    found = 600 + 9 * growth
    traffic = Traffic(
        100 + 98_765 * growth,
        1000 + 10 * growth,
        found,
        growth << 27,
        growth << 30,
        {"memory": found},
    )
    drain = DrainStatus("handing_over", 40_000, 20_000, 5, 1, 19_994)
    facts = {"engines": "1", "registered": "yes", "models": "meta-llama/Llama-3.1-8B-Instruct"}
    return ServiceStatus(
        Kind.SIDECAR,
        POD,
        "http://h",
        State.DRAINING,
        "0.1.0",
        12.5,
        tiers=TIERS,
        traffic=traffic,
        drain=drain,
        facts=facts,
    )


def show_status() -> None:
    print_status(summed([busy(0)]))


def show_drain() -> None:
    print_drains([DrainOutcome("sidecar", POD, busy(0).drain)])


@pytest.mark.parametrize("show", [show_status, show_drain])
@pytest.mark.parametrize("columns", [20, 40, 80, 120, 200])
def test_no_name_and_no_number_is_cut_at_any_width(
    show: Callable[[], None],
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Columns are left out instead; each line that a wide terminal has, less some cells, is
    there.
    """

    def words_at(width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        show()
        return capsys.readouterr().out.split()

    narrow, wide = words_at(columns), words_at(300)
    assert POD in narrow
    assert set(narrow) - {word for word in narrow if set(word) == {"\u2500"}} <= set(wide), (
        "no word is new, so none is cut"
    )
    assert "\u2026" not in "".join(narrow)


def test_tables_of_the_charts_pods_fit_into_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    prefix = "cache-lmcache-"
    names = ["storage-0", "storage-1", "llama-6f7c9d8b4-q9m4w"]
    pods = [
        msgspec.structs.replace(busy(0), name=prefix + name, name_prefix=prefix) for name in names
    ]
    print_status(summed(pods))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name in names:
        assert any(f" {name} " in line for line in lines), name
    assert f"Names without {prefix}, which all pods begin with." in lines
    assert any("60.0%" in line for line in lines), "the hit ratio is the last to go"


def test_a_pipe_has_no_end_of_a_line(tmp_path: Path) -> None:
    program = "from tests.unit.ctl.test_output import show_status; show_status()"
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environ
    )
    [line] = [line for line in done.stdout.splitlines() if "Instruct" in line]
    assert {"sidecar", POD, "draining", "0.1.0", "20006"} <= set(line.replace(",", "").split())


@pytest.mark.parametrize("columns", [40, 80])
def test_colours_only_where_they_are_wanted(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    cells = (POD, "no answer", "it hangs, or the network drops what is sent to it")
    print_table(("name", "state", "why"), [cells], left=2, prose=True)
    shown = capsys.readouterr().out
    assert "\x1b[3" not in shown
    assert POD in shown
