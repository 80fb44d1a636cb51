"""The figures of the README and of docs/compare.md: all follow from the tables of
docs/benchmarks.md, by these rules.

- Settings are the defaults.
- What is in several comparable rows, of any table, is given as a range over all of them, or by the
  one that is least kind to us. A relay before the sidecar (a sidecar that answers late) is another
  comparison.
- Figures of CPUs and of GPUs, and of what is measured and what is estimated, share no table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

PREFIX_CACHE = "vLLM's own prefix cache"
WITH_CONNECTOR = "the same, with our connector"
FIRST_TOKENS = {
    "recomputed": "cold",
    PREFIX_CACHE: PREFIX_CACHE,
    WITH_CONNECTOR: f"{PREFIX_CACHE}, with the connector",
    "the pod's sidecar": "memory of the sidecar",
    "the sidecar's disk, page cache": "disk of the sidecar",
    "the storage service, loopback": "storage service",
    "another pod, loopback": "sidecar of another pod",
}
"""How the README calls where KV came from, and the benchmark its row."""
TIERS = {
    "memory": ("hot, ", "sidecar, "),
    "disk": ("disk, ",),
    "`lm://`": ("lm://",),
    "Redis": ("Redis",),
}
FILE_TIER = {"vLLM's file tier": ("tier behind vLLM's host memory",)}
OTHERS = {"a chunk of 1 KiB": ("fixed cost of a chunk",), "CacheGen": ("CacheGen",)}
"""How docs/compare.md calls what is compared, and how the names of its rows begin."""
CALLS = {
    "load": (": retrieve", ": decode"),
    "store": (": store", ": encode"),
    "lookup": (": lookup",),
}
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

Rows = Sequence[Sequence[str]]


def tables(text: str, begin: str) -> Iterator[list[list[str]]]:
    """Yield the tables after a heading, up to the next one of its level, with their headings."""
    level = begin.strip().partition(" ")[0]
    section = re.split(rf"\n#{{1,{len(level)}}} ", text.partition(begin)[2])[0]
    for found in re.finditer(r"(?:^\|.*\|\n)+", section, re.MULTILINE):
        lines = re.findall(r"^\|(.*)\|$", found[0], re.MULTILINE)
        yield [
            [cell.strip() for cell in line.split("|")]
            for line in lines
            if not set(line) <= set("|:-")
        ]


def first_tokens(benchmarks: str) -> dict[str, tuple[str, str]]:
    """Return milliseconds to the first token, and how many times faster than recomputing that is,
    by the README's name of where KV came from.
    """
    first, *_ = tables(benchmarks, "\n## vLLM\n")
    measured = {row[0]: row[1:] for row in first}
    return {name: (measured[row][0], measured[row][1]) for name, row in FIRST_TOKENS.items()}


def peer_rows(benchmarks: str) -> Rows:
    """Return the table of peers, its headings first."""
    peers, *_ = tables(benchmarks, "\n### In turn with LMCache")
    return peers


def peer_rates(call: str, beginnings: Sequence[str], rows: Rows) -> str:
    """Return how fast the peer is with ours as 1: least and most of all comparable rows; "" for
    none.

    Args:
        call: Of `CALLS`.
        beginnings: Of the names of rows.
        rows: See `peer_rows`.
    """
    column = rows[0].index("ours against peer")
    found = [
        1 / float(row[column])
        for row in rows[1:]
        if row[column]
        and row[0].startswith(tuple(beginnings))
        and any(each in row[0] for each in CALLS[call])
    ]
    return _range(found, 1 if min(found) >= 0.05 else 2) if found else ""


Pair = tuple[str, str]
"""What a first token takes in vLLM, ms: without us and with us."""


def hits_of_vllm(benchmarks: str) -> Sequence[Pair]:
    """Return all where vLLM's own cache hits: without and with our connector."""
    measured = first_tokens(benchmarks)
    return [
        (measured[PREFIX_CACHE][0], measured[WITH_CONNECTOR][0]),
        *_pairs_of_short(benchmarks, "vLLM's prefix cache, plain, ms"),
        *_pairs_of_peers(benchmarks, "vLLM, hit by its own prefix cache"),
    ]


def cold_of_vllm(benchmarks: str) -> Sequence[Pair]:
    """Return all of cold prompts: without and with stores."""
    _, costs, *_ = tables(benchmarks, "\n## vLLM\n")
    measured = {row[0]: row[1] for row in costs}
    cold = measured["cold request, not stored"]
    return [
        (cold, f"{_number(cold) + _number(measured['storing adds']):.1f}"),
        *_pairs_of_short(benchmarks, "cold, plain vLLM, ms"),
        *_pairs_of_peers(benchmarks, "vLLM, cold prompt, stores on"),
    ]


def _pairs_of_short(benchmarks: str, column: str) -> Iterator[Pair]:
    _, _, (head, *short) = tables(benchmarks, "\n## vLLM\n")
    plain = head.index(column)
    yield from ((row[plain], row[plain + 1]) for row in short if row[plain])


def _pairs_of_peers(benchmarks: str, name: str) -> Iterator[Pair]:
    head, *rows = peer_rows(benchmarks)
    plain, ours = head.index("reference"), head.index("ours")
    yield from ((row[plain], row[ours]) for row in rows if row[0].startswith(name))


def figures(benchmarks: str) -> str:
    """Return what stands in the README between `BEGIN` and `END`."""
    lines = ["| KV from | ms | times faster |", "|---|---:|---:|"]
    lines += [f"| {name} | {' | '.join(row)} |" for name, row in first_tokens(benchmarks).items()]
    section = benchmarks.partition("\n## vLLM\n")[2].partition("\n## ")[0]
    earlier = re.findall(r"^Disk, other pod and storage service were measured .*$", section, re.M)
    _, costs, *_ = tables(benchmarks, "\n## vLLM\n")
    processor = {row[0]: row[2] for row in costs}["CPU time of a store: total"]
    cold, hits = _said(cold_of_vllm(benchmarks)), _said(hits_of_vllm(benchmarks))
    costs_said = (
        f"**What it costs**: a cold prompt that is stored takes {cold} and {processor} more CPU"
        f" time; a hit of vLLM's own cache with our connector {hits}."
    )
    said = " ".join([*earlier, costs_said])
    return "\n\n".join(["\n".join(lines), said, *_estimate(benchmarks)])


def _said(pairs: Sequence[Pair]) -> str:
    times = {_number(ours) / _number(plain): (plain, ours) for plain, ours in pairs}
    plain, ours = times[max(times)]
    return f"{_range(list(times), 2)} times as long (at worst {ours} ms instead of {plain})"


def _estimate(benchmarks: str) -> Iterable[str]:
    """Yield what a hit would save on a GPU, while the benchmark estimates it."""
    found = {row[0]: row[1] for each in tables(benchmarks, "\n## On a GPU\n") for row in each}
    model = "Llama-3.1-8B"
    names = ("recompute, " + model, f"load, {model}, pinned", f"load, {model}, pageable")
    if not found.keys() >= set(names):
        return
    [cold], pinned, pageable = (
        [float(number) for number in re.findall(r"[\d.]+", found[name])] for name in names
    )
    times = [_range([cold / each for each in load], 1) for load in (pinned, pageable)]
    later = found["a hit's first token, beyond its load"]
    yield (
        f"**On a GPU, estimated, not measured** ([arithmetic](docs/benchmarks.md#on-a-gpu)): for"
        f" {model} on an H100, loads are {times[0]} times as fast as recomputing from pinned host"
        f" memory, {times[1]} from pageable; a hit's first token comes {later} after its load."
    )


def rewritten(readme: str, benchmarks: str) -> str:
    """Return the README with the figures of the benchmarks.

    Raises:
        ValueError: It lacks a place for them.
    """
    rows = peer_rows(benchmarks)
    readme = _replaced(readme, f"(?s){BEGIN}.*{END}", f"{BEGIN}\n\n{figures(benchmarks)}{END}")
    for call in ("load", "store"):
        title = f"{call.capitalize()} rate, ours = 1"
        cells = (
            peer_rates(call, [each for place in places.values() for each in place], rows)
            for places in (FILE_TIER, TIERS)
        )
        linked = " | ".join(f"[{cell}](docs/compare.md#rates)" for cell in ("1", *cells))
        line = f"| {title} | {linked} | [that of the connector][llmd-offload] |"
        readme = _replaced(readme, rf"(?m)^\| {title} \| .*$", line)
    return readme


def compared(compare: str, benchmarks: str) -> str:
    """Return docs/compare.md with the figures of the benchmarks.

    Raises:
        ValueError: It lacks a place for them.
    """
    rows = peer_rows(benchmarks)
    lines = [f"| what | {' | '.join(CALLS)} |", f"|---|{'---:|' * len(CALLS)}"]
    for name, beginnings in (TIERS | FILE_TIER | OTHERS).items():
        cells = (peer_rates(call, beginnings, rows) for call in CALLS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    return _replaced(compare, f"(?s){BEGIN}.*{END}", f"{BEGIN}\n\n{table}\n\n{END}")


def rewrite(document: Path) -> None:
    """Bring README and docs/compare.md up to date with docs/benchmarks.md."""
    benchmarks = document.read_text(encoding="utf-8")
    for page, follow in (
        (document.parents[1] / "README.md", rewritten),
        (document.with_name("compare.md"), compared),
    ):
        page.write_text(follow(page.read_text(encoding="utf-8"), benchmarks), encoding="utf-8")


def _replaced(text: str, pattern: str, new: str) -> str:
    changed, count = re.subn(pattern, lambda _: new, text)
    if count != 1:
        raise ValueError(f"the page has {pattern!r} {count} times, not once")
    return changed


def _range(found: Sequence[float], digits: int) -> str:
    low, high = (f"{each(found):.{digits}f}" for each in (min, max))
    return low if low == high else f"{low} to {high}"


def _number(text: str) -> float:
    return float(text.replace(",", ""))
