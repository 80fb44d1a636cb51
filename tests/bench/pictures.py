"""Pictures of docs/benchmarks.md and the README: all follow from the tables of that page."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path

from tests.bench import readme
from tests.bench.plot import Axis, Chart, Point, by_row
from tests.bench.readme import tables


def first_tokens(benchmarks: str) -> str:
    """Draw the README's bars: time to the first token by where the KV is."""
    section = benchmarks.partition("\n## vLLM\n")[2]
    machine = re.search(r"vLLM [\d.]+ on the CPU, [^.]*", section)
    assert machine is not None
    measured = readme.first_tokens(benchmarks)
    most = max(float(ms) for ms, _ in measured.values())
    return by_row(
        "Time to the first token, by where KV is",
        f"{_prompt(benchmarks)} tokens; {machine[0]}",
        Axis("", {0: ""}, lambda ms: ms / most),
        (196, 318, 400),
        {name: {"": float(ms)} for name, (ms, _) in measured.items()},
        lambda ms: f"{ms:.1f} ms",
    )


def by_length(benchmarks: str) -> str:
    """Draw the time to the first token by length of the prompt."""
    _, _, (head, *short) = tables(benchmarks, "\n## vLLM\n")
    measured = readme.first_tokens(benchmarks)
    long = _number(_prompt(benchmarks))

    def curve(name: str, column: int) -> list[Point]:
        found = [(_number(row[0]), _number(row[column])) for row in short if row[column]]
        return [*found, (long, float(measured[name][0]))]

    chart = Chart(
        "Time to the first token by length of the prompt",
        400,
        _log("tokens", (100, 300, 1000, 4097)),
        _log("ms", (10, 30, 100, 300, 1000, 3000), top=5000),
    )
    plain = head.index("vLLM's prefix cache, plain, ms")
    recomputed, own, connected, *places = measured
    chart.add(recomputed, points := curve(recomputed, 1), dots=points)
    chart.add(own, dots=curve(own, plain))
    chart.add(connected, dots=curve(connected, plain + 1))
    for name in places:
        chart.add(name, dots=[(long, float(measured[name][0]))])
    return chart.svg(f"{_prompt(benchmarks)} tokens: another run")


def load_rates(benchmarks: str) -> str:
    """Draw the rates of loads of all rows that have a peer."""
    (head, *body), *_ = tables(benchmarks, "\n### In turn with LMCache")
    columns = {name: head.index(name) for name in ("ours", "peer")}
    rows = {}
    for row in body:
        if ": retrieve" in row[0] and row[1] == "GB/s" and row[columns["peer"]]:
            name = re.sub(r"^.*\(peer: ([^,)]*).*\)", r"peer: \1", row[0].replace(": retrieve", ""))
            rows[name] = {series: float(row[column]) for series, column in columns.items()}
    return by_row(
        "Load rate, GB/s: ours and the peer's",
        "LMCache, unless the name says otherwise",
        _log("GB/s", (0.5, 1, 2, 5, 10, 20)),
        (300, 470, 490),
        rows,
    )


def hit_ratios(benchmarks: str) -> str:
    """Draw the hit ratio of each trace by size of memory."""
    (head, *body), *_ = tables(benchmarks, "\n## Hit ratio by size of memory\n")
    sizes = [_number(name.removesuffix(" GiB")) for name in head[1:]]
    marks = {size: f"{size:g}" if size < 1024 else f"{size / 1024:g} Ti" for size in sizes}
    chart = Chart(
        "Hit ratio by memory of all pods together, for Llama-3.1-8B",
        400,
        _log("GiB", tuple(sizes), marks),
        Axis("percent", {of: f"{of}" for of in range(0, 101, 20)}, lambda of: of / 100, (0,)),
    )
    curves: dict[str, list[list[Point]]] = {}
    for row in body:
        trace, _, _ = row[0].partition(", ")
        points = list(zip(sizes, map(float, row[1:]), strict=True))
        curves.setdefault(trace, []).append(points)
    for trace, each in curves.items():
        chart.add(trace, *each, dots=each[0])
    return chart.svg("dashed: MIN, which knows the future")


def routed(benchmarks: str) -> str:
    """Draw the time to the first token by pods, for each way to pick one."""
    traces = ("conversation", "agents")
    curves: dict[str, list[list[Point]]] = {}
    each = tables(benchmarks, "\n## Routing\n")
    for number, (head, *body) in enumerate(itertools.islice(each, len(traces))):
        column = head.index("first token, s")
        for row in body:
            pods, policy = row[0].split(" pods, ")
            curve = curves.setdefault(policy, [[] for _ in traces])[number]
            curve.append((_number(pods), _number(row[column])))
    chart = Chart(
        "Time to the first token by how routers pick a pod",
        400,
        _log("pods", (8, 64, 512)),
        _log("s, mean", (0.5, 1, 2, 5, 10, 20, 50)),
    )
    for policy, of_traces in curves.items():
        chart.add(policy, *of_traces, dots=[point for curve in of_traces for point in curve])
    return chart.svg(*map(": ".join, zip(("solid", "dashed"), traces, strict=True)))


PICTURES: dict[str, Callable[[str], str]] = {
    "first-token.svg": first_tokens,
    "first-token-by-length.svg": by_length,
    "load-rates.svg": load_rates,
    "hit-ratio.svg": hit_ratios,
    "routing-first-token.svg": routed,
}


def rewrite(document: Path) -> None:
    """Bring the pictures up to date with docs/benchmarks.md."""
    text = document.read_text(encoding="utf-8")
    for name, draw in PICTURES.items():
        document.with_name(name).write_text(draw(text), encoding="utf-8")


def _prompt(benchmarks: str) -> str:
    """Return how many tokens the prompt of the first table of vLLM has."""
    found = re.search(r"### vLLM: first token of a prompt of ([\d,]+) tokens", benchmarks)
    assert found is not None
    return found[1]


def _log(
    label: str,
    marks: tuple[float, ...],
    names: dict[float, str] | None = None,
    top: float | None = None,
) -> Axis:
    low, high = math.log(marks[0]), math.log(top or marks[-1])
    names = names or {mark: f"{mark:,g}" for mark in marks}
    return Axis(label, names, lambda value: (math.log(value) - low) / (high - low))


def _number(text: str) -> float:
    return float(text.replace(",", ""))
