"""Hit ratios of the eviction policies, of other caches' and of the optimum, on recorded and on
synthetic traces: `python -m tests.bench.eviction` (docs/adr/0007-eviction-default.md has the
figures). Simulated: no bytes move, nothing is timed.
"""

from __future__ import annotations

import heapq
import itertools
import lzma
import random
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lmcache_core._typing import override
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.storage.eviction import EvictionPolicy, create_policy

TRACES = Path(__file__).parent / "traces"
RECORDED = ("conversation", "synthetic", "agents")
CAPACITY_SHARES = (0.01, 0.05, 0.10, 0.25)
CHUNK_BYTES = 1 << 20
NEVER = 1 << 62
WINDOW_SHARE = 0.01
"""What W-TinyLFU keeps for new chunks."""
AGE_AFTER = 10
"""W-TinyLFU halves its counts after so many accesses for each chunk that is held."""

Trace = list[list[ChunkKey]]
"""Requests in their order, each the chain of chunks of its prompt."""
Queue = OrderedDict[ChunkKey, None]


@dataclass(frozen=True)
class HitRatios:
    """One row: how much of what was asked for was there.

    Attributes:
        trace: Name of the trace.
        share: Capacity as a share of the footprint (all different chunks of the trace).
        whole: Hit ratio of each policy: chunks that were hits among all chunks of all requests. A
            chunk counts as a hit only if all chunks before it in its request do, since without
            them it is of no use. For MIN, which knows the future, every chunk counts: no policy
            can reach more.
        second_half: The same, of the second half of the requests alone.
    """

    trace: str
    share: float
    whole: dict[str, float]
    second_half: dict[str, float]


def recorded_trace(name: str) -> Trace:
    """Return one of `RECORDED`; traces/README.md says what they are."""
    trace: Trace = []
    names = _names()
    for line in lzma.decompress((TRACES / f"{name}.txt.xz").read_bytes()).splitlines():
        back, num_shared, num_new = map(int, line.split())
        shared = trace[-back][:num_shared] if back else []
        trace.append(shared + list(itertools.islice(names, num_new)))
    return trace


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

    Three in ten have a second document behind the first; its chunks are others than if it came
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
    to its policy; return each request's hits.

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
    """Play a trace to Belady's MIN: of what is held and what has just come, give up what is asked
    for last. Return each request's hits.
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


def measure() -> Iterator[HitRatios]:
    """Yield every policy on every trace at every capacity; the same figures every time."""
    traces = {name: recorded_trace(name) for name in RECORDED}
    traces |= {"chat": chat_trace(), "RAG": rag_trace()}
    for name, trace in traces.items():
        footprint = len({key for request in trace for key in request})
        half = len(trace) // 2
        num_asked = sum(map(len, trace)), sum(map(len, trace[half:]))
        for share in CAPACITY_SHARES:
            num_slots = int(share * footprint)
            hits = {label: count_hits(trace, make(), num_slots) for label, make in POLICIES.items()}
            hits["MIN"] = count_optimal_hits(trace, num_slots)
            yield HitRatios(
                name,
                share,
                {label: sum(of) / num_asked[0] for label, of in hits.items()},
                {label: sum(of[half:]) / num_asked[1] for label, of in hits.items()},
            )


def head() -> str:
    """Return the head of the table."""
    labels = " | ".join(POLICIES)
    return f"| trace | capacity | {labels} | MIN |\n|---|---:|{'---:|' * (len(POLICIES) + 1)}"


def as_markdown(row: HitRatios) -> str:
    """Return a line of the table: percent of the whole trace / of its second half."""
    figures = [
        f"{100 * ratio:.1f} / {100 * row.second_half[label]:.1f}"
        for label, ratio in row.whole.items()
    ]
    return f"| {row.trace} | {row.share:.0%} | {' | '.join(figures)} |"


def _names() -> Iterator[ChunkKey]:
    for i in itertools.count():
        yield ChunkKey.of(DEFAULT_TENANT, CacheEngineKey("trace", "trace", 1, 0, f"{i:08x}"))


def _zipf(num: int, exponent: float, rng: random.Random) -> Callable[[], int]:
    """Draws 0 … num-1, the i-th with a weight of 1 / (i+1)^exponent."""
    weights = list(itertools.accumulate((i + 1) ** -exponent for i in range(num)))
    return lambda: bisect_left(weights, rng.random() * weights[-1])


# --- Policies of other caches, as far as hit ratios need them -------------------------------------


class _TwoQueues(EvictionPolicy):
    """Chunks of one size in two queues.

    Attributes:
        new: Where chunks begin.
        kept: Where others are.
    """

    def __init__(self) -> None:
        self.new: Queue = OrderedDict()
        self.kept: Queue = OrderedDict()

    @override
    def on_remove(self, key: ChunkKey) -> None:
        (self.new if key in self.new else self.kept).pop(key)

    @override
    def coldest_first(self) -> list[ChunkKey]:
        return [*self.new, *self.kept]

    def __len__(self) -> int:
        return len(self.new) + len(self.kept)


class FIFOPolicy(_TwoQueues):
    """First in, first out."""

    @override
    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        self.new[key] = None

    @override
    def on_access(self, key: ChunkKey) -> None:
        """Change nothing."""

    @override
    def victims(self) -> Iterator[ChunkKey]:
        """Yield the oldest first."""
        while self.new:
            yield next(iter(self.new))


class ARCPolicy(_TwoQueues):
    """ARC. Source: Megiddo, Modha, FAST 2003, figure 4; the capacity is what is held now."""

    def __init__(self) -> None:
        super().__init__()
        self._ghosts: tuple[Queue, Queue] = OrderedDict(), OrderedDict()
        self._target = 0.0

    @override
    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        for here, other, sign in ((0, 1, 1), (1, 0, -1)):
            ghosts = self._ghosts[here]
            if key in ghosts:
                step = sign * max(1.0, len(self._ghosts[other]) / len(ghosts))
                self._target = min(max(self._target + step, 0.0), len(self) + 1)
                del ghosts[key]
                self.kept[key] = None
                return
        self.new[key] = None

    @override
    def on_access(self, key: ChunkKey) -> None:
        self.on_remove(key)
        self.kept[key] = None

    @override
    def victims(self) -> Iterator[ChunkKey]:
        """Yield from the first queue while it has more than its target."""
        while len(self):
            num_held = len(self)
            is_new = bool(self.new) and (len(self.new) > self._target or not self.kept)
            key = next(iter(self.new if is_new else self.kept))
            yield key
            self._ghosts[not is_new][key] = None
            while len(self._ghosts[0]) + len(self.new) > num_held and self._ghosts[0]:
                self._ghosts[0].popitem(last=False)
            while len(self._ghosts[0]) + len(self._ghosts[1]) > num_held:
                self._ghosts[bool(self._ghosts[1])].popitem(last=False)


class TinyLFUPolicy(_TwoQueues):
    """W-TinyLFU with exact counts. Source: Einziger, Friedman, Manes: "TinyLFU: a highly efficient
    cache admission policy", TOS 2017; the main queue is LRU.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[ChunkKey] = Counter()
        self._num_counted = 0
        self._is_filling = True

    @override
    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        self._count(key)
        self.new[key] = None

    @override
    def on_access(self, key: ChunkKey) -> None:
        self._count(key)
        (self.new if key in self.new else self.kept).move_to_end(key)

    @override
    def victims(self) -> Iterator[ChunkKey]:
        """Yield what was asked for less often: the oldest of the window, or of the others."""
        while self._is_filling and len(self.new) > 1 + WINDOW_SHARE * len(self):
            self.kept[self.new.popitem(last=False)[0]] = None  # there has been room so far
        self._is_filling = False
        while len(self):
            if len(self.new) <= WINDOW_SHARE * len(self) and self.kept:
                yield next(iter(self.kept))
                continue
            candidate = next(iter(self.new))
            oldest = next(iter(self.kept), candidate)
            if self._counts[candidate] > self._counts[oldest]:
                del self.new[candidate]
                self.kept[candidate] = None
                candidate = oldest
            yield candidate

    def _count(self, key: ChunkKey) -> None:
        self._counts[key] += 1
        self._num_counted += 1
        if self._num_counted > AGE_AFTER * max(len(self), 1):
            self._num_counted = 0
            self._counts = Counter({key: n // 2 for key, n in self._counts.items() if n > 1})


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "FIFO": FIFOPolicy,
    "LRU": lambda: create_policy("lru"),
    "ARC": ARCPolicy,
    "S3-FIFO": lambda: create_policy("s3fifo"),
    "W-TinyLFU": TinyLFUPolicy,
    "adaptive (default)": lambda: create_policy("adaptive"),
}


if __name__ == "__main__":
    print(head())
    for measured in measure():
        print(as_markdown(measured), flush=True)
