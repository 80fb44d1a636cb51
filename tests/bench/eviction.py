"""Hit ratios of the eviction policies and of the optimum, on recorded and on synthetic traces.
`python -m tests.bench.eviction` prints all policies (docs/adr/0007-eviction-default.md has
figures), `python -m tests.bench hit_ratio` writes the default's by size of memory to
docs/benchmarks.md. Simulated: no bytes move, nothing is timed.
"""

from __future__ import annotations

import heapq
import itertools
import lzma
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path

from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.storage.eviction import EvictionPolicy, create_policy

from tests.bench.measure import Run
from tests.bench.report import SIMULATED, Findings, Section

TRACES = Path(__file__).parent / "traces"
RECORDED = ("conversation", "synthetic", "agents")
CAPACITY_SHARES = (0.01, 0.05, 0.10, 0.25)
SIZES_GIB = (16, 32, 64, 128, 256, 512, 1024, 2048)
CHUNK_TOKENS = {"conversation": 512, "synthetic": 512}
"""Of other traces 256."""
TOKEN_BYTES = 128 << 10
"""Of Llama-3.1-8B in bf16 (docs/operations.md, "Sizes")."""
CHUNK_BYTES = 1 << 20
NEVER = 1 << 62

Trace = list[list[ChunkKey]]
"""Requests in their order, each the chain of chunks of its prompt."""


DEFAULT, OPTIMUM = "adaptive (default)", "MIN"
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "LRU": lambda: create_policy("lru"),
    "S3-FIFO": lambda: create_policy("s3fifo"),
    DEFAULT: lambda: create_policy("adaptive"),
}


def recorded_trace(name: str) -> Trace:
    """Return one of `RECORDED`; traces/README.md says what they are."""
    trace: Trace = []
    names = _names()
    for back, num_shared, num_new in recorded_lines(name):
        shared = trace[-back][:num_shared] if back else []
        trace.append(shared + list(itertools.islice(names, num_new)))
    return trace


def recorded_lines(name: str) -> Iterator[tuple[int, int, int]]:
    """Yield the lines of one of `RECORDED`."""
    for line in lzma.decompress((TRACES / f"{name}.txt.xz").read_bytes()).splitlines():
        back, num_shared, num_new = map(int, line.split())
        yield back, num_shared, num_new


def chat_trace(seed: int = 1, num_conversations: int = 1000) -> Trace:
    """Conversations: each turn asks for all that was said before and adds 1 to 4 chunks.

    One in ten seconds begins (Poisson), with one of six system prompts of 8 chunks (Zipf). The
    number of turns is Pareto (1.1, at most 40): half of them have one. The user thinks between
    turns for a log-normal time, 55 s in the median, sometimes an hour.
    """
    rng = random.Random(seed)
    names = _names()
    prompts = [list(itertools.islice(names, 8)) for _ in range(6)]
    pick_prompt = _zipf(len(prompts), 1.0, rng)
    turns: list[tuple[float, int, int, list[ChunkKey]]] = []
    now = 0.0
    for conversation in range(num_conversations):
        now += rng.expovariate(0.1)
        turns.append(
            (now, conversation, min(40, int(rng.paretovariate(1.1))), prompts[pick_prompt()])
        )
    heapq.heapify(turns)
    trace = []
    while turns:
        now, conversation, num_turns, said = heapq.heappop(turns)
        said = said + list(itertools.islice(names, rng.randint(1, 4)))
        trace.append(said)
        if num_turns > 1:
            heapq.heappush(
                turns, (now + rng.lognormvariate(4.0, 1.2), conversation, num_turns - 1, said)
            )
    return trace


def rag_trace(seed: int = 2, num_requests: int = 2000, num_documents: int = 1000) -> Trace:
    """Questions to documents: a system prompt of 8 chunks, a document of 4 to 24 (Zipf, 0.9), and a
    question of 1 to 3, asked once.

    Three in ten have a second document after the first; its chunks are others than if it came
    first.
    """
    rng = random.Random(seed)
    names = _names()
    prompt = list(itertools.islice(names, 8))
    pick_document = _zipf(num_documents, 0.9, rng)
    sizes = [rng.randint(4, 24) for _ in range(num_documents)]
    chains: dict[tuple[int, ...], list[ChunkKey]] = {}
    trace = []
    for _ in range(num_requests):
        path = (pick_document(),)
        asked = list(prompt)
        for _ in range(2 if rng.random() < 0.3 else 1):
            if path not in chains:
                chains[path] = list(itertools.islice(names, sizes[path[-1]]))
            asked += chains[path]
            path = (*path, pick_document())
        trace.append(asked + list(itertools.islice(names, rng.randint(1, 3))))
    return trace


def hit_ratio(trace: Trace, policy: EvictionPolicy, num_slots: int) -> float:
    """Return the part of all chunks that were hits; see `count_hits`."""
    return sum(count_hits(trace, policy, num_slots)) / sum(map(len, trace))


def count_hits(trace: Trace, policy: EvictionPolicy, num_slots: int) -> list[int]:
    """Play a trace to a tier of so many chunks, in the order in which the host-memory tier reports
    to its policy; return each request's hits. A chunk is a hit only if all chunks before it in its
    request are: without them it is useless.

    Each request reads what is held of it (accesses are reported last chunk first), then stores the
    rest: room for all of it is made, head first, and then it is inserted last chunk first.
    """
    held: set[ChunkKey] = set()
    hits = []
    for request in trace:
        here = [key in held for key in request]
        hits.append(here.index(False) if False in here else len(request))
        for key in reversed(request):
            if key in held:
                policy.on_access(key)
        missing = [key for key, is_here in zip(request, here, strict=True) if not is_here]
        num_kept = min(len(missing), num_slots)
        for key in itertools.islice(policy.victims(), max(0, len(held) + num_kept - num_slots)):
            policy.on_remove(key)
            held.remove(key)
        for key in reversed(missing[:num_kept]):
            policy.on_insert(key, CHUNK_BYTES)
            held.add(key)
    return hits


def optimal_hit_ratio(trace: Trace, num_slots: int) -> float:
    """Return the part of all chunks that were hits; see `count_optimal_hits`."""
    return sum(count_optimal_hits(trace, num_slots)) / sum(map(len, trace))


def count_optimal_hits(trace: Trace, num_slots: int) -> list[int]:
    """Play a trace to Belady's MIN: of what is held and what is new, give up what is asked for
    last. Return each request's hits; every chunk counts.
    """
    asked = [key for request in trace for key in request]
    next_use = [NEVER] * len(asked)
    last: dict[ChunkKey, int] = {}
    for at in range(len(asked) - 1, -1, -1):
        next_use[at] = last.get(asked[at], NEVER)
        last[asked[at]] = at
    held: dict[ChunkKey, int] = {}
    latest: list[tuple[int, int]] = []
    hits = []
    for at, key in enumerate(asked):
        hits.append(key in held)
        if next_use[at] == NEVER:
            held.pop(key, None)
            continue
        held[key] = next_use[at]
        heapq.heappush(latest, (-next_use[at], at))
        while len(held) > num_slots:
            when, since = heapq.heappop(latest)
            if held.get(asked[since]) == -when:
                del held[asked[since]]
    each = iter(hits)
    return [sum(itertools.islice(each, len(request))) for request in trace]


def traces() -> dict[str, Trace]:
    """Return all traces."""
    recorded = {name: recorded_trace(name) for name in RECORDED}
    return recorded | {"chat": chat_trace(), "RAG": rag_trace()}


def replayed(trace: Trace, policy: str, num_slots: int) -> str:
    """Return the percentage of hits in a trace's second half, before which memory has filled.

    Args:
        policy: Of `POLICIES`, or `OPTIMUM`, which knows the future: no policy can reach more.
    """
    if policy == OPTIMUM:
        hits = count_optimal_hits(trace, num_slots)
    else:
        hits = count_hits(trace, POLICIES[policy](), num_slots)
    half = len(trace) // 2
    return f"{100 * sum(hits[half:]) / sum(map(len, trace[half:])):.1f}"


def table() -> Iterator[str]:
    """Yield the lines of a table: hits of every policy on every trace at every capacity, a share of
    all different chunks.
    """
    policies = (*POLICIES, OPTIMUM)
    yield f"| trace | capacity | {' | '.join(policies)} |"
    yield f"|---|---:|{'---:|' * len(policies)}"
    for name, trace in traces().items():
        footprint = len({key for request in trace for key in request})
        for share in CAPACITY_SHARES:
            cells = (replayed(trace, policy, int(share * footprint)) for policy in policies)
            yield f"| {name} | {share:.0%} | {' | '.join(cells)} |"


def by_size(run: Run) -> Findings:
    """Return the section `hit-ratio`: the default policy and the optimum by size of memory."""
    rows = []
    for name, trace in traces().items():
        chunk_bytes = CHUNK_TOKENS.get(name, 256) * TOKEN_BYTES
        slots = [(size << 30) // chunk_bytes for size in SIZES_GIB]
        for policy in (DEFAULT, OPTIMUM):
            what = f"{name}, {policy}"
            cells = run(what, lambda: [replayed(trace, policy, num) for num in slots])  # noqa: B023
            rows.append((what, *cells, ""))
    headings = ("trace, policy", *(f"{size:,} GiB" for size in SIZES_GIB), "")
    title = "Hit ratio by memory of all pods together, percent"
    return Findings([Section(title, headings, rows)], machine=SIMULATED)


def _names() -> Iterator[ChunkKey]:
    for i in itertools.count():
        yield ChunkKey.of(DEFAULT_TENANT, CacheEngineKey("trace", "trace", 1, 0, f"{i:08x}"))


def _zipf(num: int, exponent: float, rng: random.Random) -> Callable[[], int]:
    """Draws 0 … num-1, the i-th with a weight of 1 / (i+1)^exponent."""
    weights = list(itertools.accumulate((i + 1) ** -exponent for i in range(num)))
    return lambda: bisect_left(weights, rng.random() * weights[-1])


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
