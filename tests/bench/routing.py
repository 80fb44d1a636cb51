"""What a router saves that knows which pod has which chunk: recorded traces are replayed to pods.
Simulated: no bytes move, nothing is timed. The same seed gives the same figures.

A prompt comes, the policy picks a pod, and the pod serves its prompts one after the other. It
loads what its GPU, its arena, its disk or the storage service has and computes the rest. When it
has ended, its three tiers and storage have the whole prompt. All tiers evict what was used last
longest ago, the ends of prompts before their beginnings; the product's own policy keeps more.
Decoding, and pulls from the arenas of other pods, are left out.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import random
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import mul

from tests.bench import events
from tests.bench.eviction import CHUNK_TOKENS, TOKEN_BYTES, recorded_lines
from tests.bench.measure import Run
from tests.bench.report import SIMULATED, Findings, Section

GPU, ARENA, DISK, STORAGE = range(4)
DELAY_S = (0.0, 0.2, 0.2)
"""Until a router knows what a pod's tier has: vLLM tells at the end of a step, our connector once
in a round (`ROUND_S`).
"""
PODS = (8, 64, 512)
COPIES = {"conversation": 1, "agents": 4}
"""Of a trace, for 8 pods. They share nothing."""
FIRST_PARTS = {"conversation": (1, 1, 8), "agents": (2, 8, 16)}
"""By `PODS`: of a trace, its first so-manieth part is replayed."""
LOADS = {"conversation": 0.7, "agents": 2.8}
"""Of the pods' time, if they computed everything: 3.7 requests of the conversations in a second to
8 pods (recorded: 3.4), and the next prompt of an agent after half a minute.
"""
MAX_TOKENS = 131_072
"""Llama-3.1's window: longer prompts end there."""
HASHED_TOKENS = 1024
ANSWER_S = 1.0
"""From the end of a prompt's prefill to the session's next prompt, at least: 50 tokens of 20 ms."""
SLICE = 4096
GOAL = 0.95


@dataclass(frozen=True)
class Setup:
    """Pods of Llama-3.1-8B.

    Attributes:
        gib: Of a pod's GPU blocks, arena and disk, and of storage per pod.
        computed_per_s: Tokens of prefill.
        loaded_per_s: Tokens, by tier. A tier that is slower than computing is not read.
    """

    gib: tuple[float, float, float, float]
    computed_per_s: float
    loaded_per_s: tuple[float, float, float, float]

    def slots(self, chunk_tokens: int) -> list[int]:
        """Return how many chunks each tier has room for."""
        fast = [rate > self.computed_per_s for rate in self.loaded_per_s]
        chunk_gib = chunk_tokens * TOKEN_BYTES / (1 << 30)
        return [int(gib / chunk_gib) if on else 0 for gib, on in zip(self.gib, fast, strict=True)]


# docs/benchmarks.md: 8,192 tokens from pinned memory in 24 ms ("On a GPU"), "disk: retrieve, cold"
# at 2.59 GB/s; docs/operations.md, "Sizes": storage over 25 Gbit/s.
RATES = (float("inf"), 8192 / 0.024, 2.59e9 / TOKEN_BYTES, 25e9 / 8 / TOKEN_BYTES)
FULL = Setup((24, 64, 100, 87), 8000, RATES)
"""A card of 48 GB; `arenaSize` of the chart's example, a disk of 100 GiB, and storage and prefill
of the example in docs/operations.md.
"""
SETUPS = {
    "GPU 24, arena 64, disk 100, storage 87": FULL,
    "GPU 24, arena 8, storage 6 (the chart's defaults)": Setup((24, 8, 0, 6), 8000, RATES),
    "GPU 48, arena 96 (H100, 37,500 tokens/s)": Setup((48, 96, 0, 0), 37_500, RATES),
}

# --- Traces ---------------------------------------------------------------------------------------

Path = Sequence[tuple[int, int]]
"""A prompt as stretches of chunks, each with its length: prompts share whole stretches."""


@dataclass(frozen=True)
class Trace:
    """What pods are asked, in its order.

    Attributes:
        paths: Of each request, its prompt.
        sessions: Of each request, the one whose prompt it continues.
        load: Of the pods' time, if they computed everything.
        num_copies: Of it, mixed at random.
    """

    chunk_tokens: int
    paths: Sequence[Path]
    sessions: Sequence[int]
    load: float = 0.7
    num_copies: int = 1


def read_trace(lines: Iterable[tuple[int, int, int]], chunk_tokens: int) -> Trace:
    """Return a trace of lines as traces/README.md describes them.

    A request continues the session of the one before it whose prompt it has, but for the last two
    chunks: one is partial, and the answer follows it.
    """
    most = MAX_TOKENS // chunk_tokens
    # What each request added is a run of chunks; others have the first so many of it.
    prompts: list[list[tuple[int, int]]] = []
    sizes: list[int] = []
    cuts: list[set[int]] = []
    sessions: list[int] = []
    for at, (back, num_shared, num_new) in enumerate(lines):
        before = prompts[at - back] if back else []
        prompt: list[tuple[int, int]] = []
        left = min(num_shared, most)
        for run, length in before:
            if left:
                prompt.append((run, min(left, length)))
                left -= prompt[-1][1]
        size = sum(length for _, length in prompt)
        continues = back and size > 1 and size >= sizes[at - back] - 2
        sessions.append(sessions[at - back] if continues else at)
        num_new = min(num_new, most - size)
        if num_new:
            prompt.append((at, num_new))
        sizes.append(size + num_new)
        cuts.append(set())
        for run, length in prompt:
            cuts[run].add(length)
        prompts.append(prompt)
    names = itertools.count()
    stretches = [
        [(end, next(names), end - begin) for begin, end in itertools.pairwise([0, *sorted(ends)])]
        for ends in cuts
    ]
    paths = [
        tuple(
            (name, length)
            for run, has in prompt
            for end, name, length in stretches[run]
            if end <= has
        )
        for prompt in prompts
    ]
    return Trace(chunk_tokens, paths, sessions)


def recorded(name: str, num_pods: int) -> Trace:
    """Return what so many pods are asked.

    Args:
        num_pods: One of `PODS`.
    """
    trace = read_trace(recorded_lines(name), CHUNK_TOKENS.get(name, 256))
    num = len(trace.paths) // FIRST_PARTS[name][PODS.index(num_pods)]
    copies = COPIES[name] * num_pods // PODS[0]
    return replace(
        trace,
        paths=trace.paths[:num],
        sessions=trace.sessions[:num],
        load=LOADS[name],
        num_copies=copies,
    )


# --- Pods -----------------------------------------------------------------------------------------


class Tier:
    """What a tier holds: of each stretch the first so many chunks; used last longest ago first."""

    def __init__(self, num_slots: int) -> None:
        self.held: OrderedDict[int, int] = OrderedDict()
        self._num_free = num_slots

    def put(self, path: Path) -> tuple[dict[int, int], int, int]:
        """Use a prompt. Return what is held now of the stretches of which it has changed, and how
        many chunks came and went.
        """
        held, changed = self.held, {}
        came = went = 0
        for name, length in reversed(path):
            has = held.get(name, 0)
            if has < length:
                held[name] = changed[name] = length
                came += length - has
            held.move_to_end(name)
        self._num_free -= came
        while self._num_free < 0:
            name, has = next(iter(held.items()))
            num = min(has, -self._num_free)
            self._num_free += num
            went += num
            changed[name] = has - num
            if num == has:
                del held[name]
            else:
                held[name] = has - num
        return changed, came, went


Held = Mapping[int, int]
NOTHING: dict[int, int] = {}


def hits(path: Path, pod: Sequence[Held], storage: Held) -> tuple[int, int, int, int]:
    """Return how many chunks of a prompt come from each tier, the fastest first, up to the first
    chunk that none has. vLLM's own hits end where its blocks do.
    """
    gpu, arena, disk = pod
    of_gpu = of_arena = of_disk = of_storage = 0
    is_gpu = True
    for name, length in path:
        have = 0
        if is_gpu:
            have = gpu.get(name, 0)
            of_gpu += have
            if have == length:
                continue
            is_gpu = False
        more = arena.get(name, 0)
        if more > have:
            of_arena += more - have
            have = more
        if have < length:
            more = disk.get(name, 0)
            if more > have:
                of_disk += more - have
                have = more
            if have < length:
                more = storage.get(name, 0)
                if more > have:
                    of_storage += more - have
                    have = more
                if have < length:
                    break
    return of_gpu, of_arena, of_disk, of_storage


class Known:
    """What a router knows of the pods.

    Args:
        tiers: Those that it is told about.
    """

    def __init__(self, num_pods: int, tiers: Sequence[int]) -> None:
        self.tiers = tiers
        self.pods: list[list[dict[int, int]]] = [[{}, {}, {}] for _ in range(num_pods)]
        self.holders: dict[int, set[int]] = defaultdict(set)

    def tell(self, pod: int, tier: int, changed: Mapping[int, int]) -> None:
        """Note what a pod's tier holds of some stretches."""
        tiers = self.pods[pod]
        held = tiers[tier]
        for name, length in changed.items():
            if length:
                held[name] = length
                self.holders[name].add(pod)
            elif held.pop(name, 0) and not any(name in each for each in tiers):
                self.holders[name].discard(pod)


@dataclass
class Found:
    """What a replay's second half came to, before which the tiers have filled.

    Attributes:
        tokens: From each tier, and computed.
        saved_s: Prefill, less what loads took instead.
        busy_s: Of each pod.
        first_s: From each prompt to its end, in all.
        events: Of each of a pod's tiers, chunks that came and that went.
        lasted_s: From its first prompt to its last.
    """

    tokens: list[int] = field(default_factory=lambda: [0] * 5)
    saved_s: float = 0.0
    busy_s: list[float] = field(default_factory=list)
    first_s: float = 0.0
    num_requests: int = 0
    events: list[list[int]] = field(default_factory=lambda: [[0, 0], [0, 0], [0, 0]])
    lasted_s: float = 0.0

    @property
    def mean_first_s(self) -> float:
        """Time from a prompt to the end of its prefill."""
        return self.first_s / self.num_requests

    @property
    def imbalance(self) -> float:
        """The busiest pod's time, of their mean."""
        return max(self.busy_s) * len(self.busy_s) / sum(self.busy_s)


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        number: In the order in which they come.
    """

    number: int
    path: Path
    session: tuple[int, int]


class Replay:
    """Pods that serve copies of a trace.

    Args:
        policy: Of `POLICIES`.
    """

    def __init__(
        self, trace: Trace, num_pods: int, setup: Setup, policy: str, seed: int = 1
    ) -> None:
        self.trace = trace
        self.num_pods = num_pods
        self.num_requests = len(trace.paths) * trace.num_copies
        slots = setup.slots(trace.chunk_tokens)
        self._pods = [[Tier(num) for num in slots[:STORAGE]] for _ in range(num_pods)]
        self._held = [[tier.held for tier in pod] for pod in self._pods]
        self._storage = Tier(slots[STORAGE] * num_pods)
        self.compute_s = trace.chunk_tokens / setup.computed_per_s
        self.load_s = [trace.chunk_tokens / rate for rate in setup.loaded_per_s]
        self.free_at = [0.0] * num_pods
        self._pick, tiers, self._is_at_once = POLICIES[policy]
        self.known = Known(num_pods, tiers)
        self.known_storage = self._storage.held if self._is_at_once else NOTHING
        self._chance = random.Random(seed)
        self.now = 0.0
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._num_come = 0
        self._waiting: dict[tuple[int, int], deque[Asked]] = {}
        self._asked = [0] * trace.num_copies
        self._num_names = 1 + max(name for path in trace.paths for name, _ in path)
        chunks = sum(length for path in trace.paths for _, length in path)
        self._gap_s = chunks / len(trace.paths) * self.compute_s / (num_pods * trace.load)
        self.found = Found(busy_s=[0.0] * num_pods)
        self._half_at = 0.0

    def play(self, num: int) -> None:
        """Let the next requests come, at most so many; after the last, serve all that still wait
        for the answer before them.
        """
        for _ in range(min(num, self.num_requests - self._num_come)):
            copy = self._draw_copy()
            at = self._asked[copy]
            self._asked[copy] += 1
            base = copy * self._num_names
            path = [(base + name, length) for name, length in self.trace.paths[at]]
            self._pass_until(self.now + self._chance.expovariate(1 / self._gap_s))
            self._come(Asked(self._num_come, path, (copy, self.trace.sessions[at])))
            self._num_come += 1
        if self._num_come == self.num_requests:
            self._pass_until(math.inf)

    def _pass_until(self, until: float) -> None:
        while self._later and self._later[0][0] <= until:
            self.now, _, act = heapq.heappop(self._later)
            act()
        self.now = until

    def _come(self, asked: Asked) -> None:
        """Serve a request, or let it wait until its session's one before it is answered."""
        if asked.number == self.num_requests // 2:
            self._half_at = self.now
        self.found.lasted_s = self.now - self._half_at
        waiting = self._waiting.get(asked.session)
        if waiting is not None:
            waiting.append(asked)
            return
        self._waiting[asked.session] = deque()
        self._send(asked)

    def _send(self, asked: Asked) -> None:
        ends_at = self._serve(self._pick(self, asked), asked)
        self._at(ends_at + ANSWER_S, lambda: self._answered(asked.session))

    def _answered(self, session: tuple[int, int]) -> None:
        waiting = self._waiting[session]
        if waiting:
            self._send(waiting.popleft())
        else:
            del self._waiting[session]

    def _draw_copy(self) -> int:
        while True:
            copy = self._chance.randrange(self.trace.num_copies)
            if self._asked[copy] < len(self.trace.paths):
                return copy

    def seconds(self, path: Path, pod: Sequence[Held], storage: Held) -> float:
        """Return how long a pod takes for a prompt, if it has this."""
        return self._needed_s(path, hits(path, pod, storage))

    def _needed_s(self, path: Path, loaded: Sequence[int]) -> float:
        num_computed = sum(length for _, length in path) - sum(loaded)
        return num_computed * self.compute_s + sum(map(mul, loaded, self.load_s))

    def _serve(self, pod: int, asked: Asked) -> float:
        """Let a pod serve a prompt; return when its prefill ends."""
        path = asked.path
        loaded = hits(path, self._held[pod], self._storage.held)
        num = sum(length for _, length in path)
        needed_s = self._needed_s(path, loaded)
        ends_at = self.free_at[pod] = max(self.now, self.free_at[pod]) + needed_s
        is_counted = asked.number >= self.num_requests // 2
        for tier in (GPU, ARENA, DISK):
            changed, came, went = self._pods[pod][tier].put(path)
            if is_counted:
                self.found.events[tier][0] += came
                self.found.events[tier][1] += went
            if tier in self.known.tiers and changed:
                due = 0.0 if self._is_at_once else ends_at + DELAY_S[tier]
                self._at(due, partial(self.known.tell, pod, tier, changed))
        self._at(ends_at, lambda: self._storage.put(path))
        if is_counted:
            self._count(pod, num, loaded, needed_s, ends_at)
        return ends_at

    def _at(self, due: float, act: Callable[[], object]) -> None:
        if due <= self.now:
            act()
        else:
            heapq.heappush(self._later, (due, next(self._numbers), act))

    def _count(
        self, pod: int, num: int, loaded: Sequence[int], needed_s: float, ends_at: float
    ) -> None:
        found = self.found
        for place, chunks in enumerate((*loaded, num - sum(loaded))):
            found.tokens[place] += chunks * self.trace.chunk_tokens
        found.saved_s += num * self.compute_s - needed_s
        found.busy_s[pod] += needed_s
        found.first_s += ends_at - self.now
        found.num_requests += 1


# --- Policies -------------------------------------------------------------------------------------


def in_turn(replay: Replay, asked: Asked) -> int:
    """Pick the next pod."""
    return asked.number % replay.num_pods


def by_session(replay: Replay, asked: Asked) -> int:
    """Pick the same pod for all of a session."""
    return zlib.crc32(repr(asked.session).encode()) % replay.num_pods


def by_beginning(replay: Replay, asked: Asked) -> int:
    """Pick by a hash of the prompt's beginning: the stretch in which it ends has all before it."""
    left, named = HASHED_TOKENS // replay.trace.chunk_tokens, 0
    for name, length in asked.path:
        if left > 0:
            named = name
        left -= length
    return zlib.crc32(b"%d" % named) % replay.num_pods


def by_cost(replay: Replay, asked: Asked) -> int:
    """Pick where the prompt ends first: of the pods that have something of it, and the one that is
    free first. How long each pod is busy is known.
    """
    known, storage, path = replay.known, replay.known_storage, asked.path
    pods: set[int] = set()
    for name, length in path:
        pods |= known.holders.get(name, set())
        if storage.get(name, 0) < length:
            break  # what comes later is of no use to pods that have nothing up to here
    free_at = replay.free_at
    pods.add(free_at.index(min(free_at)))
    return min(
        (
            max(free_at[pod] - replay.now, 0.0) + replay.seconds(path, known.pods[pod], storage),
            free_at[pod],
            pod,
        )
        for pod in pods
    )[2]


OURS, ORACLE, BY_GPU = "by our events", "oracle", "by GPU events only"
POLICIES: dict[str, tuple[Callable[[Replay, Asked], int], tuple[int, ...], bool]] = {
    "round robin": (in_turn, (), False),
    "by session": (by_session, (), False),
    f"by hash of {HASHED_TOKENS:,} tokens": (by_beginning, (), False),
    BY_GPU: (by_cost, (GPU,), False),
    OURS: (by_cost, (GPU, ARENA, DISK), False),
    ORACLE: (by_cost, (GPU, ARENA, DISK), True),
}
"""How a pod is picked, which tiers the router is told about, and whether it knows everything at
once, prompts that still wait and storage too.
"""

# --- Tables ---------------------------------------------------------------------------------------


def replayed(trace: Trace, num_pods: int, setup: Setup, policy: str, run: Run, what: str) -> Found:
    """Return what a replay came to; says how far it is."""
    replay = Replay(trace, num_pods, setup, policy)
    for done in range(0, replay.num_requests, SLICE):
        run(f"{what}: {done / replay.num_requests:.0%}", lambda: replay.play(SLICE))
    return replay.found


def measure(run: Run) -> Findings:
    """Return the section `routing`; takes minutes."""
    gc.disable()  # each pass would walk millions of objects, of which none are in cycles
    sections, told = [], []
    for name in COPIES:
        rows = []
        for num_pods in PODS:
            trace = recorded(name, num_pods)
            found = {
                policy: replayed(
                    trace, num_pods, FULL, policy, run, f"{name}, {num_pods} pods, {policy}"
                )
                for policy in POLICIES
            }
            best = found[ORACLE].saved_s
            for policy, each in found.items():
                goal = f"goal: {GOAL}" if policy == OURS and num_pods in (8, 64) else ""
                rows.append((f"{num_pods} pods, {policy}", *_cells(each, best), goal))
            told.append(_events_row(name, num_pods, found[OURS], trace.chunk_tokens))
        headings = (
            "router",
            *("GPU, %", "arena, %", "disk, %", "storage, %", "computed, %"),
            *("prefill saved, s", "of the oracle's", "largest over mean load"),
            *("first token, s", "note"),
        )
        sections.append(Section(f"Routing: the {name} trace", headings, rows))
    sections.append(_by_setup(run))
    sections.append(
        Section(
            "Routing: our events, all pods together",
            ("trace, pods", "stored a second", "removed a second", "kB a second", "a pod", ""),
            told,
        )
    )
    gc.enable()
    return Findings(sections, [_sizes_remark()], SIMULATED)


def _cells(found: Found, best: float) -> Iterator[str]:
    for tokens in found.tokens:
        yield f"{100 * tokens / sum(found.tokens):.1f}"
    yield f"{found.saved_s:,.0f}"
    yield f"{found.saved_s / best:.3f}"
    yield f"{found.imbalance:.2f}"
    yield f"{found.mean_first_s:.2f}"


def _by_setup(run: Run) -> Section:
    compared = ("by session", BY_GPU, OURS)
    rows = []
    for what, setup in SETUPS.items():
        for name in COPIES:
            trace = recorded(name, 8)
            found = {
                policy: replayed(trace, 8, setup, policy, run, f"{what}, {name}, {policy}")
                for policy in (*compared, ORACLE)
            }
            shares = [f"{found[each].saved_s / found[ORACLE].saved_s:.3f}" for each in compared]
            rows.append((f"{what}: {name}", *shares, f"{found[ORACLE].saved_s:,.0f}", ""))
    headings = ("GiB a pod: trace", *compared, "oracle: prefill saved, s", "")
    return Section("Routing: prefill saved of the oracle's, by size, 8 pods", headings, rows)


def _events_row(name: str, num_pods: int, found: Found, chunk_tokens: int) -> tuple[str, ...]:
    each = chunk_tokens / events.CHUNK_TOKENS / found.lasted_s
    stored = (found.events[ARENA][0] + found.events[DISK][0]) * each
    # What comes is taken back first.
    removed = stored + (found.events[ARENA][1] + found.events[DISK][1]) * each
    of_stored, of_removed = events.event_bytes()
    kb = (stored * of_stored + removed * of_removed) / 1000
    return (
        f"{name}, {num_pods}",
        f"{stored:,.1f}",
        f"{removed:,.1f}",
        f"{kb:,.1f}",
        f"{kb / num_pods:.2f}",
        "",
    )


def _sizes_remark() -> str:
    stored, removed = events.event_bytes()
    return (
        f"One event of a chunk of {events.CHUNK_TOKENS} tokens, in blocks of {events.BLOCK_TOKENS}:"
        f" {stored:,} bytes stored, {removed:,} removed."
    )
