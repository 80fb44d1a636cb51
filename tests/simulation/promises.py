"""Promises of the product that are judged in each call, whatever faults there are.

Most are about a step inside a call: that a copy is kept before it is acknowledged, that a lift has
ended before an answer is final. No public door shows such steps, so judges replace methods of the
product's classes, also inner ones, for good.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tests.simulation import disk, inside
from tests.simulation.threads import SimulatedThread

if TYPE_CHECKING:
    from tests.simulation.kernel import Process
    from tests.simulation.world import World

LATE_S = 5.0
"""A call of a tier may exceed its limit by this much."""
LATE_DRAIN_S = 1.0
"""The same for a drain."""
SENT_S = 0.001
"""A wait for an answer may begin this long before its end with an unsent question."""
PULLED_S = 0.1
"""A pull ends within this time of the arrival of its last chunk."""


def install(world: World) -> None:
    """Judge calls of the product in this process; what breaks a promise becomes a complaint."""
    _end_in_time(world)
    _answer_for_each(world)
    _announce_what_is_held(world)
    _keep_what_is_synced(world)
    _keep_what_is_acknowledged(world)
    _serve_what_can_be_read(world)
    _pull_from_peers(world)
    _wait_for_lifts(world)
    _hold_what_is_offered(world)
    _drop_no_only_copy(world)
    _send_what_is_asked(world)
    _start_few_threads(world)
    _end_threads_of_recovery(world)


def instead_of(owner: type, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a method by the decorated function, which gets it as its first argument."""
    method = getattr(owner, name)

    def replace(judge: Callable[..., Any]) -> None:
        def judged(*args: Any, **options: Any) -> Any:
            return judge(method, *args, **options)

        setattr(owner, name, judged)

    return replace


def _process(world: World) -> Process:
    """Return the process that runs."""
    assert world.kernel.process is not None
    return world.kernel.process


@contextlib.contextmanager
def _limited(world: World, what: str, limit_s: float) -> Iterator[None]:
    """Complain if the block lasts longer; time in which its process was paused does not count."""
    process = _process(world)
    began, paused_s = world.kernel.now, process.paused_s
    try:
        yield
    finally:
        seconds = world.kernel.now - began - (process.paused_s - paused_s)
        if seconds > limit_s:
            world.complaints.append(
                f"{process.name}: {what} lasted {seconds:.1f} s; its limit is {limit_s:.1f} s"
            )


def _end_in_time(world: World) -> None:
    from lmcache_core.storage.guard import Guard
    from lmcache_node.drain import NodeDrain

    @instead_of(Guard, "_attempt")
    @contextlib.asynccontextmanager
    async def attempt_judged(
        attempt: Any, guard: Any, operation: Any, keys: Any, limit_s: float
    ) -> AsyncIterator[Any]:
        with _limited(world, f"{operation} of {guard.name}", limit_s + LATE_S):
            async with attempt(guard, operation, keys, limit_s) as one:
                yield one

    @instead_of(NodeDrain, "_drain")
    async def drain_judged(drain: Any, *args: Any) -> None:
        settings = world.nodes[_process(world).name].settings
        with _limited(world, "a drain", settings.drain_timeout_s + LATE_DRAIN_S):
            await drain(*args)


def _answer_for_each(world: World) -> None:
    """A tier says something about each chunk that it is asked for or given."""
    from lmcache_core.storage.guard import Guard

    async def judged(
        call: Any, guard: Any, items: Sequence[Any], *args: Any, **options: Any
    ) -> Any:
        process = _process(world)
        results = await call(guard, items, *args, **options)
        if len(results) != len(items):
            world.complaints.append(
                f"{process.name}: {call.__name__} of {guard.name} answers {len(results)} times for"
                f" {len(items)} chunks"
            )
        return results

    for name in ("batched_contains", "batched_get", "batched_put"):
        instead_of(Guard, name)(judged)


def _announce_what_is_held(world: World) -> None:
    """A chunk that is announced is there: if it has gone, its removal was announced before."""
    from lmcache_core.lookup import InstanceReporter
    from lmcache_core.storage.announcer import TierAnnouncer

    tiers_of = WeakKeyDictionary[Any, dict[str, Any]]()
    has_key = True

    @instead_of(TierAnnouncer, "connect")
    def connect_noted(connect: Any, announcer: Any, reporter: Any, tiers: Sequence[Any]) -> None:
        tiers_of[announcer] = {tier.name: tier for tier in tiers}
        connect(announcer, reporter, tiers)

    @instead_of(TierAnnouncer, "stored")
    def stored_judged(stored: Any, announcer: Any, key: Any, tier: str, num_bytes: int) -> None:
        nonlocal has_key
        of = tiers_of.get(announcer, {}).get(tier)
        has_key = of is None or of.contains_now([key])[0]
        stored(announcer, key, tier, num_bytes)
        has_key = True

    @instead_of(InstanceReporter, "stored")
    def announce_judged(announce: Any, reporter: Any, chunk_id: Any, tier: str, *args: Any) -> None:
        if not has_key:
            name = _process(world).name
            world.complaints.append(f"{name}: announces a chunk that its {tier} lacks")
        announce(reporter, chunk_id, tier, *args)


def _keep_what_is_synced(world: World) -> None:
    """A chunk that is stored with `disk_fsync` outlives a power cut. The fault that cuts the power
    looks for what is noted here.
    """
    from lmcache_core.record import Miss
    from lmcache_core.storage.disk.files import DiskFiles
    from lmcache_core.storage.disk.layout import DiskLayout
    from lmcache_core.storage.disk.store import DiskStore

    synced, writing = world.synced, Counter[tuple[Any, str]]()

    @instead_of(DiskStore, "write")
    def write_synced(write: Any, store: Any, chunk: Any) -> bool:
        process = _process(world)
        node = world.nodes.get(process.name)
        if node is None:  # an engine with tiers of its own, which never syncs
            return bool(write(store, chunk))
        of_machine = synced.setdefault(process.machine.name, set())
        path = str(DiskLayout(Path(node.settings.disk_path)).record(chunk.key))
        [held] = node.tiers.disk.peek_many([chunk.key])
        if isinstance(held, Miss) or (held.lossy and not chunk.lossy):
            of_machine.discard(path)
        writing[process, path] += 1
        try:
            is_kept = bool(write(store, chunk))
        finally:
            writing[process, path] -= 1
        if is_kept and node.settings.disk_fsync:
            of_machine.add(path)
            device = world.files.disks[process.machine.name]
            # Another write may have replaced the file meanwhile, or removed it.
            is_alone = not writing[process, path]
            if is_alone and device.has(path) and device.would_lose(path):
                world.complaints.append(
                    f"{process.name}: has stored {path}, which a power cut would lose"
                )
        return is_kept

    @instead_of(DiskFiles, "unlink")
    def unlink_synced(unlink: Any, disk_files: Any, path: Path) -> None:
        synced.get(_process(world).machine.name, set()).discard(str(path))
        unlink(disk_files, path)


def _keep_what_is_acknowledged(world: World) -> None:
    """A chunk that was acknowledged is held; one in an arena outlives its sidecar, however that
    ends (see `check_journal`).
    """
    from lmcache_core.keys import ChunkKey
    from lmcache_core.record import decode_head
    from lmcache_core.storage.stack import TierStack
    from lmcache_core.wire.server import LmSession
    from lmcache_sidecar.socket.session import EngineSession

    kept_of: ContextVar[dict[Any, bool]] = ContextVar("kept_of")

    @instead_of(TierStack, "batched_put")
    async def put_noted(put: Any, stack: Any, chunks: Sequence[Any], *args: Any) -> Any:
        results = await put(stack, chunks, *args)
        kept_of.get({}).update(zip([chunk.key for chunk in chunks], results, strict=True))
        return results

    @instead_of(EngineSession, "_commit")
    async def commit_judged(commit: Any, session: Any, request: Any) -> Any:
        process = _process(world)
        context = world.socket_servers[process.name].context
        kept: dict[Any, bool] = {}
        kept_of.set(kept)
        answer = await commit(session, request)
        in_memory = inside.chunks_in_memory(context.stack.hot)
        _, acknowledged = world.acknowledged.setdefault(process, (context, {}))
        for (_, head), is_stored in zip(request.items, answer.present, strict=True):
            if is_stored:
                key = ChunkKey.of(context.tenant, decode_head(head)[0].engine_key())
                if not kept.get(key):
                    world.complaints.append(f"{process.name}: acknowledges what it does not keep")
                if (chunk := in_memory.get(key)) is not None:
                    acknowledged[key] = chunk
        return answer

    @instead_of(LmSession, "_keep")
    async def keep_judged(keep: Any, *args: Any) -> Any:
        process, kept = _process(world), list[bool]()
        *before, store = args

        async def store_noted(chunk: Any) -> bool:
            kept.append(await store(chunk))
            return kept[-1]

        answer = await keep(*before, store_noted)
        if answer.stored and kept != [True]:
            world.complaints.append(f"{process.name}: acknowledges what it does not keep")
        return answer


def check_journal(world: World, process: Process) -> None:
    """Complain if a sidecar that is about to be killed has acknowledged chunks that its next start
    would not find in the arena's journal.
    """
    from lmcache_sidecar.arena.entries import JournalError, read_entries, replay, with_padding
    from lmcache_sidecar.arena.journal import FILE_NAME

    context, acknowledged = world.acknowledged.pop(process, (None, {}))
    journal = None if context is None else context.journal
    if journal is None or not journal.is_recording:
        return
    arena, found = context.arena, set[tuple[int, bytes]]()
    with contextlib.suppress(FileNotFoundError, JournalError):  # then nothing is recovered
        data = disk.content(str(arena.path.parent / FILE_NAME))
        extents = replay(read_entries(data), arena.size, arena.inode)
        found.update((entry.offset, with_padding(entry.head)) for entry in extents.committed)
    held = inside.chunks_in_memory(context.stack.hot)
    lost = [
        key
        for key, chunk in acknowledged.items()
        if held.get(key) is chunk
        and (chunk.memory.metadata.address, bytes(chunk.head)) not in found
    ]
    if lost:
        world.complaints.append(
            f"{process.name}: {len(lost)} acknowledged chunks are in no journal"
        )


def _serve_what_can_be_read(world: World) -> None:
    """A file whose payload was unreadable is served again only once it can be read."""
    from lmcache_core.storage.disk.store import DiskStore

    @instead_of(DiskStore, "look_again")
    def look_again_judged(look_again: Any, store: Any) -> bool:
        process, room = _process(world), inside.room_of(store)
        before = {path for path, why in room.unread.items() if why.needs_payload}
        has_more = bool(look_again(store))
        disk = world.files.disks[process.machine.name]
        for path in sorted(before - room.unread.keys()):
            if disk.has(str(path)) and disk.is_broken(str(path)):
                world.complaints.append(f"{process.name}: serves {path.name}, which is unreadable")
        return has_more


def _pull_from_peers(world: World) -> None:
    """A pull ends when everything has arrived, figures count the peers that failed, and a peer is
    abandoned only if it sends nothing.
    """
    from lmcache_core.p2p.pull import STALL_SHARE, PeerPull, PulledBytes
    from lmcache_core.record import Chunk

    kernel = world.kernel
    running = dict[Any, set[Any]]()
    in_company = set[Any]()
    made_of = WeakKeyDictionary[Any, tuple[Any, dict[str, int], float, float]]()
    arrived_s: ContextVar[list[float]] = ContextVar("arrived_s")

    @instead_of(PeerPull, "__init__")
    def init_noted(
        init: Any, pull: Any, parts: Any, keys: Any, holders: Any, allocate: Any, deadline: float
    ) -> None:
        init(pull, parts, keys, holders, allocate, deadline)
        places = {key.key.chunk_id().hex(): i for i, key in enumerate(keys[: len(holders)])}
        stall_s = max(0.0, deadline - kernel.now) * STALL_SHARE
        made_of[pull] = parts, places, deadline, stall_s

    @instead_of(PulledBytes, "add")
    def add_noted(add: Any, *args: Any) -> None:
        arrived_s.get([]).append(kernel.now)
        add(*args)

    @instead_of(PeerPull, "run")
    async def run_judged(run: Any, pull: Any, assignments: Sequence[Any]) -> Any:
        process, (parts, places, *_) = _process(world), made_of[pull]
        pulls = running.setdefault(parts.peers, set())
        pulls.add(pull)
        if len(pulls) > 1:
            in_company.update(pulls)
        num_pulls, num_failed = parts.figures.pulls, parts.figures.failed_pulls
        paused_s = process.paused_s
        arrived_s.set([])
        try:
            results = await run(pull, assignments)
        finally:
            pulls.discard(pull)
            is_alone = pull not in in_company
            in_company.discard(pull)
        asked = {places[chunk] for one in assignments for chunk in one.chunk_ids}
        is_whole = all(isinstance(results[place], Chunk) for place in asked)
        has_all = all(isinstance(results[place], Chunk) for place in places.values())
        late_s = kernel.now - arrived_s.get()[-1] if has_all and arrived_s.get() else 0.0
        late_s -= process.paused_s - paused_s
        if late_s > PULLED_S:
            world.complaints.append(
                f"{process.name}: a pull lasted {late_s:.1f} s longer than its chunks took"
            )
        num_failed = parts.figures.failed_pulls - num_failed
        if is_alone and parts.figures.pulls == num_pulls + 1 and num_failed == is_whole:
            world.complaints.append(
                f"{process.name}: {num_failed} of 1 pulls failed; whole={is_whole}"
            )
        return results

    @instead_of(PeerPull, "_judge")
    async def judge_judged(judge: Any, pull: Any, share: Any) -> None:
        process, (*_, deadline, stall_s) = _process(world), made_of[pull]
        late_at = min(share.moved + stall_s, deadline)
        if share.open and share.work.cancelled() and kernel.now < late_at:
            world.complaints.append(
                f"{process.name}: abandons a peer with {len(share.open)} missing chunks"
            )
        await judge(pull, share)


def _wait_for_lifts(world: World) -> None:
    """An answer about chunks is final only when no more of them are being lifted."""
    from lmcache_core.storage.staging import Stager

    @instead_of(Stager, "_lift_block")
    async def lift_block_judged(lift_block: Any, stager: Any, ticket: Any, *args: Any) -> None:
        process = _process(world)
        await lift_block(stager, ticket, *args)
        if ticket.is_ready:
            world.complaints.append(f"{process.name}: says all about chunks while it lifts some")


def _hold_what_is_offered(world: World) -> None:
    """Each chunk that a ticket says to be there is held for it, that of every rank."""
    from lmcache_core.storage.staging import StageTicket

    @instead_of(StageTicket, "staged")
    def staged_judged(staged: Any, ticket: Any) -> Any:
        process, held = _process(world), {chunk.key for chunk in ticket.held}
        for chain in ticket.chains if not ticket.is_over else ():
            there = [number for number, tier in enumerate(chain.tiers) if tier]
            missing = set(chain.names_of(there) if there else ()) - held
            if missing:
                world.complaints.append(
                    f"{process.name}: offers {len(there)} chunks and does not hold {len(missing)}"
                )
        return staged(ticket)


def _drop_no_only_copy(world: World) -> None:
    """A storage drops what it has moved only if another one has it."""
    from lmcache_storage.handover.mover import Mover
    from lmcache_storage.served_store import Departures

    held: dict[str, set[Any]] = {}

    def name_and_held() -> tuple[str, set[Any]]:
        process = _process(world)
        others = [
            node
            for name, node in world.nodes.items()
            if name.startswith("storage") and name != process.name
        ]
        return process.name, {
            key
            for node in others
            for disk in [node.tiers.disk]
            for key in (*inside.chunks_in_memory(node.stack.hot), *inside.names_on_disk(disk))
        }

    @instead_of(Mover, "still_home")
    async def still_home_noted(still_home: Any, mover: Any, keys: Any) -> Any:
        name, held[name] = name_and_held()
        return await still_home(mover, keys)

    @instead_of(Departures, "forget")
    async def forget_judged(forget: Any, departures: Any, keys: Sequence[Any], remove: Any) -> None:
        name, held_now = name_and_held()
        num_lost = len(set(keys) - held_now - held.pop(name, set()))
        if num_lost:
            world.complaints.append(f"{name}: drops {num_lost} chunks that no other storage has")
        await forget(departures, keys, remove)


def _send_what_is_asked(world: World) -> None:
    """Who waits for an answer of a sidecar has sent its question, or waits for room in the
    socket.
    """
    from lmcache_core.sidecar.connection import SidecarConnection

    @instead_of(SidecarConnection, "_next_frame")
    def next_frame_judged(next_frame: Any, connection: Any, socket: Any, deadline: float) -> Any:
        if inside.has_unsent(connection) and world.kernel.now < deadline - SENT_S:
            name = _process(world).name
            world.complaints.append(f"{name}: awaits the answer to an unsent question")
        return next_frame(connection, socket, deadline)


def _start_few_threads(world: World) -> None:
    """A thread is started again only when it has ended."""
    started: dict[tuple[int, object], SimulatedThread] = {}

    @instead_of(SimulatedThread, "start")
    def start_judged(start: Any, thread: Any) -> None:
        process, target = _process(world), thread._target
        if inspect.ismethod(target):
            which = id(target.__self__), target.__func__
            if which in started and started[which].is_alive():
                world.complaints.append(f"{process.name}: starts {thread.name} while it runs")
            started[which] = thread
        start(thread)


def _end_threads_of_recovery(world: World) -> None:
    """The threads that check what is in an arena end with the checks."""
    from lmcache_sidecar.arena.recovery import ArenaRecovery

    @instead_of(ArenaRecovery, "run")
    async def run_judged(run: Any, recovery: Any, *args: Any) -> None:
        await run(recovery, *args)
        process = _process(world)
        left = [name for name in world.kernel.threads(process) if name.startswith("lmcache-recov")]
        if left:
            world.complaints.append(f"{process.name}: keeps {left} after it has checked its arena")
