"""Promises of the product that are judged in each call, whatever faults there are.

Most are about a step inside a call: that a copy is kept before it is acknowledged, that a lift has
ended before an answer is final. No public door shows such steps, so judges replace inner methods of
the product's classes, and read what these decide by.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.simulation import disk
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
    _keep_peers_that_send(world)
    _wait_for_lifts(world)
    _hold_what_is_offered(world)
    _drop_no_only_copy(world)
    _send_what_is_asked(world)
    _start_few_threads(world)
    _end_threads_of_recovery(world)


@contextlib.contextmanager
def _limited(world: World, what: str, limit_s: float) -> Iterator[None]:
    """Complain if the block lasts longer; time in which its process was paused does not count."""
    process = world.kernel.process
    assert process is not None
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

    attempt, drain = Guard._attempt, NodeDrain._drain

    @contextlib.asynccontextmanager
    async def attempt_judged(
        guard: Any, operation: Any, keys: Any, limit_s: float
    ) -> AsyncIterator[Any]:
        with _limited(world, f"{operation} of {guard.name}", limit_s + LATE_S):
            async with attempt(guard, operation, keys, limit_s) as one:
                yield one

    async def drain_judged(node: Any, *args: Any) -> None:
        with _limited(world, "a drain", node._timeout_s + LATE_DRAIN_S):
            await drain(node, *args)

    Guard._attempt = attempt_judged  # type: ignore[method-assign, assignment]
    NodeDrain._drain = drain_judged  # type: ignore[method-assign]


def _answer_for_each(world: World) -> None:
    """A tier says something about each chunk that it is asked for or given."""
    from lmcache_core.storage.guard import Guard

    def judged(name: str, call: Any) -> Any:
        async def call_judged(guard: Any, items: Sequence[Any], *args: Any, **options: Any) -> Any:
            process = world.kernel.process
            assert process is not None
            results = await call(guard, items, *args, **options)
            if len(results) != len(items):
                world.complaints.append(
                    f"{process.name}: {name} of {guard.name} answers {len(results)} times for"
                    f" {len(items)} chunks"
                )
            return results

        return call_judged

    for name in ("batched_contains", "batched_get", "batched_put"):
        setattr(Guard, name, judged(name, getattr(Guard, name)))


def _announce_what_is_held(world: World) -> None:
    """A chunk that is announced is there: if it has gone, its removal was announced before."""
    from lmcache_core.lookup import InstanceReporter
    from lmcache_core.storage.announcer import TierAnnouncer

    stored, announce = TierAnnouncer.stored, InstanceReporter.stored
    has_key = True

    def stored_judged(announcer: Any, key: Any, tier: str, num_bytes: int) -> None:
        nonlocal has_key
        of = announcer._tiers.get(tier)
        has_key = of is None or of.contains_now([key])[0]
        stored(announcer, key, tier, num_bytes)
        has_key = True

    def announce_judged(reporter: Any, chunk_id: bytes, tier: str, *args: Any) -> None:
        process = world.kernel.process
        assert process is not None
        if not has_key:
            world.complaints.append(f"{process.name}: announces a chunk that its {tier} lacks")
        announce(reporter, chunk_id, tier, *args)

    TierAnnouncer.stored = stored_judged  # type: ignore[method-assign]
    InstanceReporter.stored = announce_judged  # type: ignore[method-assign]


def _keep_what_is_synced(world: World) -> None:
    """A chunk that is stored with `disk_fsync` outlives a power cut. The fault that cuts the power
    looks for what is noted here.
    """
    from lmcache_core.storage.disk.files import DiskFiles
    from lmcache_core.storage.disk.store import DiskStore

    write, unlink, synced = DiskStore.write, DiskFiles.unlink, world.synced

    def write_synced(store: Any, chunk: Any) -> bool:
        process = world.kernel.process
        assert process is not None
        of_machine = synced.setdefault(process.machine.name, set())
        path = str(store._layout.record(chunk.key))
        if store._index.wants(chunk.key, chunk.lossy):
            of_machine.discard(path)
        is_kept = write(store, chunk)
        if is_kept and store._fsync:
            of_machine.add(path)
            device = world.files.disks[process.machine.name]
            # Another write may have replaced the file meanwhile, or removed it.
            is_alone = all(one.key != chunk.key for one in store._writing)
            if is_alone and device.has(path) and device.would_lose(path):
                world.complaints.append(
                    f"{process.name}: has stored {path}, which a power cut would lose"
                )
        return is_kept

    def unlink_synced(disk_files: Any, path: Path) -> None:
        process = world.kernel.process
        assert process is not None
        synced.get(process.machine.name, set()).discard(str(path))
        unlink(disk_files, path)

    DiskStore.write = write_synced  # type: ignore[method-assign]
    DiskFiles.unlink = unlink_synced  # type: ignore[method-assign]


def _keep_what_is_acknowledged(world: World) -> None:
    """A chunk that was acknowledged is held; one in an arena outlives its sidecar, however that
    ends (see `check_journal`).
    """
    from lmcache_core.keys import ChunkKey
    from lmcache_core.record import decode_head
    from lmcache_core.storage.stack import TierStack
    from lmcache_core.wire.server import LmSession
    from lmcache_sidecar.socket.session import EngineSession

    commit, keep, put = EngineSession._commit, LmSession._keep, TierStack.batched_put
    kept_of: ContextVar[dict[Any, bool]] = ContextVar("kept_of")

    async def put_noted(stack: Any, chunks: Sequence[Any], *args: Any) -> Any:
        results = await put(stack, chunks, *args)
        kept_of.get({}).update(zip([chunk.key for chunk in chunks], results, strict=True))
        return results

    async def commit_judged(session: Any, request: Any) -> Any:
        process, context = world.kernel.process, session._context
        assert process is not None
        kept: dict[Any, bool] = {}
        kept_of.set(kept)
        answer = await commit(session, request)
        hot = context.stack.hot
        _, acknowledged = world.acknowledged.setdefault(process, (context, {}))
        for (_, head), is_stored in zip(request.items, answer.present, strict=True):
            if is_stored:
                key = ChunkKey.of(context.tenant, decode_head(head)[0].engine_key())
                if not kept.get(key):
                    world.complaints.append(f"{process.name}: acknowledges what it does not keep")
                if (chunk := hot._chunks.get(key)) is not None:
                    acknowledged[key] = chunk
        return answer

    async def keep_judged(session: Any, *args: Any) -> Any:
        process, kept = world.kernel.process, list[bool]()
        assert process is not None
        *before, store = args

        async def store_noted(chunk: Any) -> bool:
            kept.append(await store(chunk))
            return kept[-1]

        answer = await keep(session, *before, store_noted)
        if answer.stored and kept != [True]:
            world.complaints.append(f"{process.name}: acknowledges what it does not keep")
        return answer

    TierStack.batched_put = put_noted  # type: ignore[method-assign, assignment]
    EngineSession._commit = commit_judged  # type: ignore[method-assign]
    LmSession._keep = keep_judged  # type: ignore[method-assign]


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
    begin, found = journal._begin, set[tuple[int, bytes]]()
    with contextlib.suppress(FileNotFoundError, JournalError):  # then nothing is recovered
        data = disk.content(str(journal._directory / FILE_NAME))
        extents = replay(read_entries(data), begin.arena_bytes, begin.inode)
        found.update((entry.offset, with_padding(entry.head)) for entry in extents.committed)
    held = context.stack.hot._chunks
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

    look_again = DiskStore.look_again

    def look_again_judged(store: Any) -> bool:
        process = world.kernel.process
        assert process is not None
        before = {path for path, why in store._room.unread.items() if why.needs_payload}
        has_more = look_again(store)
        disk = world.files.disks[process.machine.name]
        for path in sorted(before - store._room.unread.keys()):
            if disk.has(str(path)) and disk.is_broken(str(path)):
                world.complaints.append(f"{process.name}: serves {path.name}, which is unreadable")
        return has_more

    DiskStore.look_again = look_again_judged  # type: ignore[method-assign]


def _pull_from_peers(world: World) -> None:
    """A pull ends when everything has arrived, and figures count the peers that failed."""
    from lmcache_core.p2p.pull import PeerPull
    from lmcache_core.record import Chunk

    run, take = PeerPull.run, PeerPull._take
    kernel, arrived_s = world.kernel, dict[Any, float]()
    running = dict[Any, set[Any]]()
    in_company = set[Any]()

    def take_noted(pull: Any, *args: Any) -> None:
        take(pull, *args)
        if all(isinstance(pull._results[place], Chunk) for place in pull._places.values()):
            arrived_s.setdefault(pull, kernel.now)

    async def run_judged(pull: Any, assignments: Sequence[Any]) -> Any:
        process, parts = kernel.process, pull._parts
        assert process is not None
        pulls = running.setdefault(parts.peers, set())
        pulls.add(pull)
        if len(pulls) > 1:
            in_company.update(pulls)
        num_pulls, num_failed = parts.figures.pulls, parts.figures.failed_pulls
        paused_s = process.paused_s
        try:
            results = await run(pull, assignments)
        finally:
            pulls.discard(pull)
            is_alone = pull not in in_company
            in_company.discard(pull)
            last_s = arrived_s.pop(pull, kernel.now)
        asked = {pull._places[chunk] for one in assignments for chunk in one.chunk_ids}
        is_whole = all(isinstance(results[place], Chunk) for place in asked)
        late_s = kernel.now - last_s - (process.paused_s - paused_s)
        if is_whole and late_s > PULLED_S:
            world.complaints.append(
                f"{process.name}: a pull lasted {late_s:.1f} s longer than its chunks took"
            )
        num_failed = parts.figures.failed_pulls - num_failed
        if is_alone and parts.figures.pulls == num_pulls + 1 and num_failed == is_whole:
            world.complaints.append(
                f"{process.name}: {num_failed} of 1 pulls failed; whole={is_whole}"
            )
        return results

    PeerPull._take = take_noted  # type: ignore[method-assign]
    PeerPull.run = run_judged  # type: ignore[method-assign]


def _keep_peers_that_send(world: World) -> None:
    """A peer is abandoned only if it sends nothing."""
    from lmcache_core.p2p.pull import PeerPull

    judge = PeerPull._judge

    async def judge_judged(pull: Any, share: Any) -> None:
        process, late_at = world.kernel.process, share.moved + pull._stall_s
        assert process is not None
        if share.open and share.work.cancelled() and pull._now() < min(late_at, pull._deadline):
            world.complaints.append(
                f"{process.name}: abandons a peer with {len(share.open)} missing chunks"
            )
        await judge(pull, share)

    PeerPull._judge = judge_judged  # type: ignore[method-assign]


def _wait_for_lifts(world: World) -> None:
    """An answer about chunks is final only when no more of them are being lifted."""
    from lmcache_core.storage.staging import Stager

    lift_block = Stager._lift_block

    async def lift_block_judged(stager: Any, ticket: Any, *args: Any) -> None:
        process = world.kernel.process
        assert process is not None
        await lift_block(stager, ticket, *args)
        if ticket.is_ready:
            world.complaints.append(f"{process.name}: says all about chunks while it lifts some")

    Stager._lift_block = lift_block_judged  # type: ignore[method-assign]


def _hold_what_is_offered(world: World) -> None:
    """Each chunk that a ticket says to be there is held for it, that of every rank."""
    from lmcache_core.storage.staging import StageTicket

    staged = StageTicket.staged

    def staged_judged(ticket: Any) -> Any:
        process, held = world.kernel.process, {chunk.key for chunk in ticket.held}
        assert process is not None
        for chain in ticket.chains if not ticket.is_over else ():
            there = [number for number, tier in enumerate(chain.tiers) if tier]
            missing = set(chain.names_of(there) if there else ()) - held
            if missing:
                world.complaints.append(
                    f"{process.name}: offers {len(there)} chunks and does not hold {len(missing)}"
                )
        return staged(ticket)

    StageTicket.staged = staged_judged  # type: ignore[method-assign]


def _drop_no_only_copy(world: World) -> None:
    """A storage drops what it has moved only if another one has it."""
    from lmcache_storage.handover.mover import Mover
    from lmcache_storage.served_store import Departures

    still_home, forget = Mover.still_home, Departures.forget
    held: dict[str, set[Any]] = {}

    def name_and_held() -> tuple[str, set[Any]]:
        process = world.kernel.process
        assert process is not None
        others = [
            node
            for name, node in world.nodes.items()
            if name.startswith("storage") and name != process.name
        ]
        return process.name, {
            key
            for node in others
            for disk in [node.tiers.disk]
            for key in (*node.stack.hot._chunks, *(() if disk is None else disk._index._entries))
        }

    async def still_home_noted(mover: Any, keys: Any) -> Any:
        name, held[name] = name_and_held()
        return await still_home(mover, keys)

    async def forget_judged(departures: Any, keys: Sequence[Any], remove: Any) -> None:
        name, held_now = name_and_held()
        num_lost = len(set(keys) - held_now - held.pop(name, set()))
        if num_lost:
            world.complaints.append(f"{name}: drops {num_lost} chunks that no other storage has")
        await forget(departures, keys, remove)

    Mover.still_home = still_home_noted  # type: ignore[method-assign]
    Departures.forget = forget_judged  # type: ignore[method-assign]


def _send_what_is_asked(world: World) -> None:
    """Who waits for an answer of a sidecar has sent its question, or waits for room in the
    socket.
    """
    from lmcache_core.sidecar.connection import SidecarConnection

    next_frame = SidecarConnection._next_frame

    def next_frame_judged(connection: Any, socket: Any, deadline: float) -> Any:
        process = world.kernel.process
        assert process is not None
        if connection._unsent and world.kernel.now < deadline - SENT_S:
            world.complaints.append(f"{process.name}: awaits the answer to an unsent question")
        return next_frame(connection, socket, deadline)

    SidecarConnection._next_frame = next_frame_judged  # type: ignore[method-assign]


def _start_few_threads(world: World) -> None:
    """A thread is started again only when it has ended."""
    start = SimulatedThread.start
    started: dict[tuple[int, object], SimulatedThread] = {}

    def start_judged(thread: SimulatedThread) -> None:
        process, target = world.kernel.process, thread._target  # type: ignore[attr-defined]
        assert process is not None
        if inspect.ismethod(target):
            which = id(target.__self__), target.__func__
            if which in started and started[which].is_alive():
                world.complaints.append(f"{process.name}: starts {thread.name} while it runs")
            started[which] = thread
        start(thread)

    SimulatedThread.start = start_judged  # type: ignore[method-assign]


def _end_threads_of_recovery(world: World) -> None:
    """The threads that check what is in an arena end with the checks."""
    from lmcache_sidecar.arena.recovery import ArenaRecovery

    run = ArenaRecovery.run

    async def run_judged(recovery: Any, *args: Any) -> None:
        await run(recovery, *args)
        process = world.kernel.process
        assert process is not None
        left = [name for name in world.kernel.threads(process) if name.startswith("lmcache-recov")]
        if left:
            world.complaints.append(f"{process.name}: keeps {left} after it has checked its arena")

    ArenaRecovery.run = run_judged  # type: ignore[method-assign]
