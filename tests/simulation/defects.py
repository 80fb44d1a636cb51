"""Put defects into the product, one at a time, and see whether the simulation finds them.

`python -m tests.simulation.defects` prints how long the runs took that found each one, and the
share found within a time for all of them. A defect changes one place; those of the first release
are marked.
"""

from __future__ import annotations

import argparse
import compileall
import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lmcache_core.serde.warm_up import warm_up

from tests.simulation.many import ROOT, Result, run_seed

SECONDS = 80.0
"""Virtual time under faults of each run."""
CORE = "libs/lmcache_core/src/lmcache_core"
NODE = "services/node/src/lmcache_node"
VLLM = f"{CORE}/integrations/vllm"
SIDECAR = "services/sidecar/src/lmcache_sidecar"
STORAGE = "services/cache_storage/src/lmcache_storage"
LOOKUP = "services/lookup/src/lmcache_lookup"
WIRE = f"{CORE}/wire"


@dataclass(frozen=True)
class Defect:
    """A change of one place.

    Attributes:
        name: Description of the resulting fault.
        path: Path of the file.
        before: Text that occurs once in it.
        after: Replacement of that text.
        was_there: Whether the first release had it.
    """

    name: str
    path: str
    before: str
    after: str
    was_there: bool = False


DEFECTS = (
    Defect(
        "calls of tiers have no deadline",
        f"{CORE}/storage/guard.py",
        "limit = asyncio.timeout(limit_s)",
        "limit = asyncio.timeout(None)",
        was_there=True,
    ),
    Defect(
        "a breaker never closes",
        f"{CORE}/storage/guard.py",
        'tier=%s", self._name)\n        self._state = _State.CLOSED\n',
        'tier=%s", self._name)\n',
    ),
    Defect(
        "digests are not compared",
        f"{CORE}/record/codec.py",
        "if digest != header.digest:",
        "if False:",
    ),
    Defect(
        "an error of the disk counts as damage",
        f"{CORE}/storage/disk/store.py",
        "if isinstance(exc, OSError) and not is_missing and exc.errno not in NOT_A_FILE:",
        "if False:",
        was_there=True,
    ),
    Defect(
        "the name of a synced file is not synced",
        f"{CORE}/storage/disk/store.py",
        "                self._sync_names(path)\n            except OSError:",
        "                pass\n            except OSError:",
    ),
    Defect(
        "a synced file is not synced",
        f"{CORE}/storage/disk/record_file.py",
        "        if fsync:\n            files.sync(fd)\n",
        "",
    ),
    Defect(
        "a store of a served record does not sync it",
        f"{CORE}/storage/disk/store.py",
        "if not self._fsync or entry in self._synced or path is None:",
        "if True:",
    ),
    Defect(
        "a chunk counts as on disk before its file has its name",
        f"{CORE}/storage/disk/store.py",
        "                    name_record(self._files, temporary, path)\n"
        "                    self._commit(chunk.key, entry, path)\n",
        "                    self._commit(chunk.key, entry, path)\n"
        "                    name_record(self._files, temporary, path)\n",
    ),
    Defect(
        "an acknowledged store is not in the journal",
        f"{SIDECAR}/socket/session.py",
        "            if self._context.journal is not None:\n"
        "                self._context.journal.flush()\n",
        "",
    ),
    Defect(
        "a stored chunk is not recorded",
        f"{SIDECAR}/arena/journal.py",
        "            self._set(offset, entry)\n            self._note(entry)\n",
        "            self._set(offset, entry)\n",
    ),
    Defect(
        "a storage acknowledges what it refuses",
        f"{WIRE}/server.py",
        'return messages.PutOk(is_kept, "" if is_kept',
        'return messages.PutOk(True, "" if is_kept',
    ),
    Defect(
        "a sidecar acknowledges what it refuses",
        f"{SIDECAR}/socket/session.py",
        "                stored[i] = is_kept\n",
        "                stored[i] = True\n",
    ),
    Defect(
        "a chunk is stored whose last tokens are not computed",
        f"{VLLM}/requests.py",
        "num_chunks = min(num_tokens // self.chunk_size, self.names.num_chunks)",
        "num_chunks = min(-(-num_tokens // self.chunk_size), self.names.num_chunks)",
    ),
    Defect(
        "a lease at lookup is not renewed",
        f"{CORE}/lookup/reporter.py",
        "elif time.monotonic() >= self._renew_at:",
        "elif False:",
    ),
    Defect(
        "a disk has no capacity",
        f"{CORE}/storage/disk/index.py",
        "self._ledger.used_bytes + self._reserved_bytes + charge > self._room_bytes",
        "False",
    ),
    Defect(
        "tenants have no quota",
        f"{CORE}/storage/eviction/ledger.py",
        "return quota is not None and used_bytes + more_bytes > quota",
        "return False",
    ),
    Defect(
        "chunks are read without a reference",
        f"{CORE}/storage/hot.py",
        "                    chunk.memory.ref_count_up()\n                    if is_access:",
        "                    if is_access:",
    ),
    Defect(
        "what is written keeps its memory",
        f"{CORE}/storage/write_behind.py",
        "                for chunk in batch:\n                    self._settle(chunk)\n",
        "",
    ),
    Defect(
        "removals are not announced",
        f"{CORE}/lookup/reporter.py",
        'self._outbox.add(_event("remove", Holding(chunk_id, validate_tier(tier), 0, tenant)))',
        "pass",
    ),
    Defect(
        "a lost index is not announced again",
        f"{CORE}/lookup/reporter.py",
        "        self.needs_resync = True\n\n    def begin",
        "\n    def begin",
    ),
    Defect(
        "an incarnation follows the clock",
        f"{CORE}/lookup/reporter.py",
        "max(time.time_ns(), self._last_incarnation + 1)",
        "time.time_ns()",
    ),
    Defect(
        "reservations outlive their client",
        f"{SIDECAR}/socket/client_memory.py",
        "self.release([*self.reservations, *self.pins])",
        "self.release([*self.pins])",
    ),
    Defect(
        "pins outlive their client",
        f"{SIDECAR}/socket/client_memory.py",
        "self.release([*self.reservations, *self.pins])",
        "self.release([*self.reservations])",
    ),
    Defect(
        "a recovered arena is not checked",
        f"{SIDECAR}/arena/recovery.py",
        "        verify_payload(header, memory.byte_array)\n        key =",
        "        key =",
    ),
    Defect(
        "a drain has no end",
        f"{NODE}/drain.py",
        "deadline = now() + self._timeout_s",
        "deadline = now() + 3600",
    ),
    Defect(
        "a home that lost its chunks is believed to have them",
        f"{STORAGE}/handover/mover.py",
        "return [key for key in keys if held[key]]",
        "return list(keys)",
        was_there=True,
    ),
    Defect(
        "vLLM gets the blocks of a request back before they are copied",
        f"{VLLM}/planned_stores.py",
        "return has_blocks",
        "return False",
    ),
    Defect(
        "a step overwrites blocks that are not copied",
        f"{VLLM}/store_threads.py",
        "return [one for one in concerned() if one.read is None and not one.is_given_up]",
        "return []",
    ),
    Defect(
        "a chunk that is gone is announced",
        f"{CORE}/storage/announcer.py",
        "if not self._tiers[tier].contains_now([key])[0]:",
        "if False:",
    ),
    # From here on: random changes that the closest tests did not detect (`make mutants`).
    Defect(
        "what vLLM loads counts as not loaded",
        f"{VLLM}/scheduler.py",
        "state.num_local += num_external",
        "state.num_local -= num_external",
    ),
    Defect(
        "an offer outlives its load",
        f"{VLLM}/scheduler.py",
        "            state.is_loading = False\n            state.forget_offer()\n",
        "            state.is_loading = False\n",
    ),
    Defect(
        "an answer that has come is waited for",
        f"{VLLM}/scheduler.py",
        "if is_final or is_late:",
        "if is_final and is_late:",
    ),
    Defect(
        "a chunk counts though a rank lacks it",
        f"{CORE}/storage/staging.py",
        "return range(num_found // num_ranks)",
        "return range(-(-num_found // num_ranks))",
    ),
    Defect(
        "a load beside the steps is not begun",
        f"{VLLM}/worker.py",
        "self._loads.submit(load, self._begun)",
        "pass",
    ),
    Defect(
        "a load that failed in the middle names the wrong place",
        f"{VLLM}/worker.py",
        "max((run.first + num_loaded) * self._chunk_size, load.begin)",
        "max((run.first - num_loaded) * self._chunk_size, load.begin)",
    ),
    Defect(
        "a pull that is over has failed",
        f"{CORE}/p2p/pull.py",
        "        if not share.open:\n            return",
        "        if share.open:\n            return",
    ),
    Defect(
        "a peer that sends is abandoned",
        f"{CORE}/p2p/pull.py",
        "if left_s <= 0:",
        "if left_s < self._stall_s:",
    ),
    Defect(
        "questions wait for a full socket",
        f"{CORE}/sidecar/connection.py",
        "            self._flush(deadline)\n            try:",
        "            try:",
    ),
    Defect(
        "copies to other nodes keep their memory",
        f"{SIDECAR}/handover/replication_requests.py",
        "                chunk.release()",
        "                pass",
    ),
    Defect(
        "a cancelled drain lasts at the broker",
        f"{NODE}/node.py",
        "        self.pins.open()\n        if self.registration is not None:\n"
        "            self.registration.undrain()",
        "        self.pins.open()",
    ),
    Defect(
        "a sidecar announces chunks of an earlier tenant",
        f"{NODE}/node.py",
        "only_own=settings.only_tenant is not None",
        "only_own=False",
    ),
    Defect(
        "nothing is announced",
        f"{CORE}/storage/announcer.py",
        "if self._reporter is not None and tier in self._tiers",
        "if self._reporter is None and tier in self._tiers",
    ),
    Defect(
        "threads that check an arena stay",
        f"{SIDECAR}/arena/recovery.py",
        "        self._workers.close()\n        logger.info(",
        "        logger.info(",
    ),
    Defect(
        "peers that are late answer with nothing",
        f"{CORE}/storage/peer.py",
        "return [Miss(MissReason.DEADLINE)] * len(keys)",
        "return []",
    ),
    Defect(
        "a slow sidecar is asked at once when it has a thread",
        f"{CORE}/sidecar/connection.py",
        "self._prober is None or not self._prober.is_alive()",
        "self._prober is None or self._prober.is_alive()",
    ),
    Defect(
        "a file that cannot be read is served again",
        f"{CORE}/storage/disk/store.py",
        "        except OSError:\n            return False\n        return True\n",
        "        except OSError:\n            return True\n        return True\n",
    ),
    Defect(
        "a lift that has begun counts as refused",
        f"{CORE}/storage/manager.py",
        "        except UnavailableError:\n            return False\n        return True\n",
        "        except UnavailableError:\n            return False\n        return False\n",
    ),
    Defect(
        "a read that is cancelled keeps what has arrived",
        f"{WIRE}/client.py",
        "        except BaseException:\n            release_all(results)\n            raise\n"
        "        return [Miss(rest)",
        "        except BaseException:\n            raise\n        return [Miss(rest)",
    ),
    Defect(
        "a record that does not arrive whole keeps its memory",
        f"{WIRE}/incoming.py",
        "        except BaseException:\n            self.drop()\n            raise\n",
        "        except BaseException:\n            raise\n",
    ),
    Defect(
        "memory of a mover's read is free as soon as its reader gives up",
        f"{CORE}/mover/client.py",
        "                self._give_up(life, number)\n",
        "                self._give_up(life, number)\n"
        "                for memory in owned.memory:\n"
        "                    memory.ref_count_down()\n"
        "                owned.memory = ()\n",
    ),
    Defect(
        "chunks keep their memory once they are sent",
        f"{WIRE}/server.py",
        "                release_all(results)\n            if",
        "                pass\n            if",
    ),
    Defect(
        "chunks keep their memory once they have moved to another storage",
        f"{STORAGE}/handover/mover.py",
        "                chunk.release()\n",
        "                pass\n",
    ),
    Defect(
        "a new lease is seen only when another change is",
        f"{LOOKUP}/index/redis_scripts.py",
        "save(field, {number, incarnation, kind, now_ms + ttl_ms, 0, 0})\ntouch(KEYS[2])\n",
        "save(field, {number, incarnation, kind, now_ms + ttl_ms, 0, 0})\n",
    ),
    Defect(
        "what an instance held in an earlier life is not swept",
        f"{LOOKUP}/index/redis_sweeper.py",
        "if (packed.number, packed.incarnation) not in alive:",
        "if packed.number not in {number for number, _ in alive}:",
    ),
)


class Copy:
    """A copy of the package that a defect is put into."""

    def __init__(self, defect: Defect) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="defect-"))
        package = ROOT.joinpath(*Path(defect.path).parts[:4])
        file = self._folder / (ROOT / defect.path).relative_to(package.parent)
        # With what has been compiled: runs write no bytecode.
        shutil.copytree(package, self._folder / package.name)
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(defect.before, defect.after), encoding="utf-8")
        compileall.compile_dir(self._folder, quiet=2)

    @property
    def path(self) -> str:
        """Import path of the product with the defect."""
        sources = [path for where in ("libs", "services") for path in ROOT.glob(f"{where}/*/src")]
        return os.pathsep.join(map(str, [self._folder, ROOT, ROOT / "kernels/src", *sources]))

    def remove(self) -> None:
        """Remove it."""
        shutil.rmtree(self._folder, ignore_errors=True)


class Search:
    """Runs seeds 1, 2, 3 … with each defect in turn until it is found or time is over; prints what
    is found.

    Args:
        defects: What to find.
        limit_s: Real time for all of them.

    Attributes:
        found: The run that found each defect, by its name.
    """

    def __init__(self, defects: Sequence[Defect], limit_s: float) -> None:
        self._ends_at = time.monotonic() + limit_s
        self._lock = threading.Lock()
        self._left = deque(defects)
        self._tried: dict[str, set[int]] = {defect.name: set() for defect in defects}
        self._running: set[int] = set()
        self._spent_s: Counter[str] = Counter()
        self.found: dict[str, Result] = {}

    def run(self) -> None:
        """Search; several threads may do so."""
        while True:
            with self._lock:
                if not self._left or time.monotonic() > self._ends_at:
                    return
                defect = self._left[0]
                self._left.rotate(-1)
                # Two runs of a seed would wait for each other.
                others = self._tried[defect.name] | self._running
                seed = next(one for one in itertools.count(1) if one not in others)
                self._tried[defect.name].add(seed)
                self._running.add(seed)
            copy, began = Copy(defect), time.monotonic()
            try:
                result = run_seed(seed, SECONDS, path=copy.path, only_first=True, is_warm=True)
            finally:
                copy.remove()
            with self._lock:
                self._running.discard(seed)
                self._spent_s[defect.name] += time.monotonic() - began
                is_in_time = time.monotonic() <= self._ends_at
                if result["violations"] and is_in_time and defect.name not in self.found:
                    self._left.remove(defect)
                    self.found[defect.name] = result
                    spent_s = f"{self._spent_s[defect.name]:.0f}"
                    promise = result["violations"][0].splitlines()[0]
                    print(_row(defect.name, spent_s, seed, promise), flush=True)


def _row(name: str, seconds: str, seed: object, promise: str) -> str:
    return f"{name:{max(len(one.name) for one in DEFECTS)}}  {seconds:>13}  {seed:>4}  {promise}"


def main() -> int:
    """Print what was found of each defect; the exit status is 1 if one was not found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.defects",
        description="Put defects into a copy of the product; how soon does a run find each?",
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="for all of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", help="a part of its name")
    options = parser.parse_args()
    chosen = [defect for defect in DEFECTS if options.only is None or options.only in defect.name]
    warm_up()
    for where in ("libs", "services", "kernels", "tests"):
        compileall.compile_dir(ROOT / where, quiet=2)
    search = Search(chosen, 60 * options.minutes)
    print(_row("defect", "found after s", "seed", "promise"), flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for worker in [pool.submit(search.run) for _ in range(options.jobs)]:
            worker.result()
    for defect in chosen:
        if defect.name not in search.found:
            print(_row(defect.name, "-", "-", "not found"))
    num_found = len(search.found)
    print(
        f"found={num_found} of={len(chosen)} share={num_found / max(1, len(chosen)):.0%}"
        f" minutes={options.minutes:g} jobs={options.jobs}"
    )
    return 0 if num_found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
