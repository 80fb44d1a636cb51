"""The README's figures: all follow from the tables of docs/benchmarks.md, by the rules below. A
place that is in several rows is given as a range over all of them, and settings are the defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

PREFIX_CACHE = "vLLM's own prefix cache"
FIRST_TOKENS = {
    "recomputed": "cold",
    PREFIX_CACHE: PREFIX_CACHE,
    "the same, with our connector": f"{PREFIX_CACHE}, with the connector",
    "the pod's sidecar": "memory of the sidecar",
    "the sidecar's disk": "disk of the sidecar",
    "the storage service": "storage service",
    "another pod": "sidecar of another pod",
}
"""How the README calls where KV came from, and the benchmark its row. The sidecar's memory is read
with `load: async`, the default.
"""
PLACES = {
    "in memory": ("hot, ", "sidecar, "),
    "from disk": ("disk, ",),
    "over `lm://`": ("lm://",),
    "from Redis": ("Redis",),
}
"""How the README calls a place, and how the names of its rows begin."""
FILE_TIER = {"with its file tier": ("tier behind vLLM's host memory",)}
LOADS, STORES = "retrieve", "store"
SOURCE = "docs/benchmarks.md#in-turn-with-lmcache"
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


def peer_rates(call: str, places: Mapping[str, Sequence[str]], rows: Rows) -> dict[str, str]:
    """Return the peer's rates with ours as 1, by place: least and greatest of all comparable rows.

    Args:
        call: `LOADS` or `STORES`.
        places: See `PLACES`.
        rows: Of the table of peers, its headings first.
    """
    column = rows[0].index("ours against peer")
    rates = {}
    for place, beginnings in places.items():
        found = [
            1 / float(row[column])
            for row in rows[1:]
            if row[0].startswith(tuple(beginnings)) and f": {call}" in row[0] and row[column]
        ]
        rates[place] = _range(found, _digits(min(found)))
    return rates


def hits_of_vllm(benchmarks: str) -> list[tuple[float, float]]:
    """Return what first tokens take where vLLM's own cache hits, ms: without and with our
    connector, in every table that has both.
    """
    first, _, short = tables(benchmarks, "\n## vLLM\n")
    times = {row[0]: row[1] for row in first}
    found = [(times[PREFIX_CACHE], times[f"{PREFIX_CACHE}, with the connector"])]
    plain = short[0].index("vLLM's prefix cache, plain, ms")
    found += [(row[plain], row[plain + 1]) for row in short[1:] if row[plain]]
    peers, *_ = tables(benchmarks, "\n### In turn with LMCache")
    ours, limit = peers[0].index("ours"), peers[0].index("reference")
    found += [
        (row[limit], row[ours])
        for row in peers[1:]
        if row[0].startswith("vLLM, hit by its own prefix cache")
    ]
    return [(float(without), float(connected)) for without, connected in found]


def figures(benchmarks: str) -> str:
    """Return what stands between `BEGIN` and `END`."""
    first, costs, *_ = tables(benchmarks, "\n## vLLM\n")
    measured = {row[0]: row[1:] for row in [*first, *costs]}
    lines = [
        ["KV from", *FIRST_TOKENS],
        ["ms", *(measured[row][0] for row in FIRST_TOKENS.values())],
        ["times faster", *(measured[row][1] for row in FIRST_TOKENS.values())],
    ]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    table = "\n".join([head, f"|---|{'---:|' * len(FIRST_TOKENS)}", *body])
    storing, processor = measured["storing adds"], measured["CPU time of a store: total"]
    pairs = hits_of_vllm(benchmarks)
    ratios = _range([connected / without for without, connected in pairs], 2)
    without, connected = max(pairs, key=lambda pair: pair[1] / pair[0])
    said = (
        f"**What it costs**: a store adds {storing[0]} ms ({storing[1]}) to a cold request, and"
        f" {processor[1]} of CPU time. Hits of vLLM's own cache take {ratios} times as long with"
        f" our connector (at worst {connected:g} ms instead of {without:g})."
    )
    return f"{table}\n\n{' '.join([said, *_estimate(benchmarks)])}"


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
    yield (
        f"**On a GPU** nothing is measured; [estimated](docs/benchmarks.md#on-a-gpu) for {model} on"
        f" an H100, loads are {times[0]} times as fast as recomputing from pinned host memory,"
        f" {times[1]} from pageable."
    )


def rewritten(readme: str, benchmarks: str) -> str:
    """Return the README with the figures of the benchmarks.

    Raises:
        ValueError: It lacks a place for them.
    """
    peers, *_ = tables(benchmarks, "\n### In turn with LMCache")
    readme = _replaced(readme, f"(?s){BEGIN}.*{END}", f"{BEGIN}\n\n{figures(benchmarks)}{END}")
    for row, call in (("Load rate, ours = 1", LOADS), ("Store rate, ours = 1", STORES)):
        cells = [
            ", ".join(
                f"{rate} {place if call == LOADS else place.replace('from ', 'to ')}"
                for place, rate in peer_rates(call, places, peers).items()
            )
            for places in (FILE_TIER, PLACES)
        ]
        linked = " | ".join(f"[{cell}]({SOURCE})" for cell in ("1", *cells))
        readme = _replaced(
            readme,
            rf"(?m)^\| {row} \| .*$",
            f"| {row} | {linked} | [that of the connector][llmd-offload] |",
        )
    return readme


def rewrite(document: Path) -> None:
    """Bring the README up to date with docs/benchmarks.md."""
    readme = document.parents[1] / "README.md"
    text = rewritten(readme.read_text(encoding="utf-8"), document.read_text(encoding="utf-8"))
    readme.write_text(text, encoding="utf-8")


def _replaced(text: str, pattern: str, new: str) -> str:
    changed, count = re.subn(pattern, lambda _: new, text)
    if count != 1:
        raise ValueError(f"README.md has {pattern!r} {count} times, not once")
    return changed


def _range(found: Sequence[float], digits: int) -> str:
    low, high = (f"{each(found):.{digits}f}" for each in (min, max))
    return low if low == high else f"{low} to {high}"


def _digits(least: float) -> int:
    """Return how many digits a range is given with: one, or two if its least would be 0.0."""
    return 1 if least >= 0.05 else 2
