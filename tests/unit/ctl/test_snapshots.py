"""What commands print, in every format, against what they printed when somebody last looked at it.

`python -m tests.unit.ctl.test_snapshots` writes the files anew: look at the difference.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lmcache_ctl.doctor.findings import Finding, Level, diagnosis_of, print_diagnosis
from lmcache_ctl.drain import DrainOutcome, print_drains
from lmcache_ctl.output import show
from lmcache_ctl.pin import print_pins
from lmcache_ctl.services import Kind
from lmcache_ctl.states import Check, DrainStatus, Link, ServiceStatus, State, Tier, Traffic
from lmcache_ctl.status import print_status, summed
from lmcache_ctl.targets import TargetResult

FORMATS = ("table", "json", "yaml")
SNAPSHOTS = Path(__file__).parent / "snapshots"
GIB = 1 << 30
DRAIN = DrainStatus("handing_over", 40, 20, 5, 1, 14)
TIERS = [Tier("memory", 40, GIB, 4 * GIB), Tier("disk", 90, 3 * GIB, 10 * GIB)]


def state(
    kind: Kind,
    name: str,
    host: int,
    how: State,
    version: str = "0.1.0",
    latency_ms: float = 1.5,
    **more: Any,
) -> ServiceStatus:
    return ServiceStatus(
        kind, name, f"http://10.0.0.{host}:8080", how, version, latency_ms, 0.2, **more
    )


def states(growth: int) -> list[ServiceStatus]:
    found = 600 + 9 * growth
    loads = Traffic(
        100 + growth,
        1000 + 10 * growth,
        found,
        growth << 20,
        growth << 24,
        {"memory": found},
        {"evicted": 400},
    )
    link = Link("pod-a", "sidecar", "lm://10.0.0.7:65433", "z1", "n1", 0.25, True, 3, DRAIN)
    slow = [Check("index", False, "no answer within 1 s")]
    hung = ServiceStatus(
        Kind.STORAGE,
        "10.0.0.4:8080",
        "http://10.0.0.4:8080",
        State.SILENT,
        problem="no answer within 5 s: it hangs",
    )
    return [
        state(
            Kind.LOOKUP,
            "lookup-0",
            1,
            State.UNREADY,
            latency_ms=1000.1,
            problem="index: no answer within 1 s",
            checks=slow,
        ),
        state(
            Kind.BROKER,
            "broker-0",
            2,
            State.OK,
            facts={"peers": "1", "pulls": "3", "waiting": "0"},
            links=[link],
        ),
        state(
            Kind.STORAGE,
            "storage-0",
            3,
            State.OK,
            "0.0.9",
            tiers=TIERS,
            traffic=loads,
            facts={"connections": "2"},
        ),
        hung,
        state(
            Kind.SIDECAR, "pod-a", 7, State.DRAINING, tiers=TIERS[:1], traffic=loads, drain=DRAIN
        ),
    ]


def pins() -> list[TargetResult]:
    figures: dict[str, Any] = {"pinned_bytes": 3 << 20, "max_pinned_bytes": 2 * GIB}
    missing = [{"chunk_hash": "ab" * 32, "rank": 0, "group": "", "reason": "never_stored"}]
    return [
        TargetResult(Kind.SIDECAR, "pod-a", {"num_pinned": 2, "not_pinned": missing, **figures}),
        TargetResult(
            Kind.SIDECAR, "pod-b", problem="an engine must have connected to this sidecar once"
        ),
    ]


def findings() -> Any:
    return diagnosis_of(
        [
            Finding(Level.OK, "reachable", "lookup lookup-0", "answers in 1.5 ms"),
            Finding(Level.OK, "clock", "all services", "within about a second of one another"),
            Finding(
                Level.WARNING,
                "versions",
                "all services",
                "0.0.9: storage storage-0; 0.1.0: lookup lookup-0",
                "finish the upgrade",
            ),
            Finding(
                Level.ERROR,
                "reachable",
                "storage 10.0.0.4:8080",
                "no answer within 5 s",
                "start it",
            ),
            Finding(
                Level.NOTE,
                "redis",
                "lookup lookup.yaml, redis:6379",
                "it writes every change to a disk",
                "appendonly no",
            ),
        ]
    )


def drains() -> list[DrainOutcome]:
    done = DrainOutcome("sidecar", "pod-a", DrainStatus("done", 40, 30, 10, 0, 0))
    return [
        done,
        DrainOutcome("peer", "pod-b", DRAIN, "not done within 10 s"),
        DrainOutcome("storage", "storage-0", problem="it is away"),
    ]


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "status": (lambda: summed(states(0)), print_status),
    "doctor": (findings, print_diagnosis),
    "pin": (pins, print_pins),
    "drain": (drains, print_drains),
}


def printed(name: str, output: str) -> str:
    """As on a terminal of 140 columns that knows no colours."""
    value, as_table = CASES[name]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        show(value(), output, as_table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize("output", FORMATS)
@pytest.mark.parametrize("name", list(CASES))
def test_what_is_printed(name: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert printed(name, output) == (SNAPSHOTS / f"{name}.{output}").read_text(encoding="utf-8")


def test_tables_of_the_charts_pods_fit_into_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    pods = ("lookup-7d9f8b6c5-x2x4z", "broker-7d9f8b6c5-abcde", "storage-0", "storage-1")
    names = [*pods, "vllm-llama-6f7c9d8b4-q9m4w"]

    def looked_at(growth: int) -> list[ServiceStatus]:
        prefix = "cache-lmcache-"
        return [
            msgspec.structs.replace(one, name=prefix + name, name_prefix=prefix)
            for one, name in zip(states(growth), names, strict=True)
        ]

    print_status(summed(looked_at(0)))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name in names:
        assert any(f" {name} " in line for line in lines), name
    assert "Names without cache-lmcache-, which all pods begin with." in lines


if __name__ == "__main__":
    os.environ["COLUMNS"] = "140"
    SNAPSHOTS.mkdir(exist_ok=True)
    for case in CASES:
        for form in FORMATS:
            (SNAPSHOTS / f"{case}.{form}").write_text(printed(case, form), encoding="utf-8")
