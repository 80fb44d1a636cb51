"""Every place of the product that deletes, moves aside or cuts what is stored, and what allows it.

Only a record's own digest condemns a record. An answer of the environment (an error number, a
status, a page, a short list) never deletes: it costs a miss. A deletion that is in no row fails
here; so does a row without a deletion.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = sorted(
    path
    for pattern in ("libs/lmcache_core/src/**/*.py", "services/*/src/**/*.py")
    for path in ROOT.glob(pattern)
)
DELETING: Final = frozenset(
    {
        *("unlink", "rmdir", "rmtree", "removedirs", "rename", "truncate", "ftruncate"),
        *("set_aside", "batched_remove", "eval", "_discard", "_delete"),
    }
)
"""Names of functions that delete, whatever they belong to."""
STORES: Final = frozenset(
    {
        *("_backend", "_client", "client", "_directory", "_objects", "_stack", "_store", "store"),
        *("_uncounted", "hot", "index", "os", "self", "stack", "tier"),
    }
)
"""What `remove`, `clear` and `evict` delete from; on other things they empty collections."""
COMMANDS: Final = re.compile(r"\b(UNLINK|DEL|HDEL|DELETE|FLUSHALL|FLUSHDB)\b")

ALLOWED: Final = {
    "a caller asks for it": (
        "lmcache_core/documented/disk.py: LocalDiskBackend.remove.remove",
        "lmcache_core/storage/disk/store.py: DiskStore.clear.remove",
        "lmcache_core/storage/disk/store.py: DiskStore.clear.unlink",
        "lmcache_core/storage/disk/store.py: DiskStore.remove.unlink",
        "lmcache_core/storage/manager.py: StorageManager.evict.batched_remove",
        "lmcache_core/storage/manager.py: StorageManager.forget.evict",
        "lmcache_core/storage/remote/file.py: SharedDirectory.clear.unlink",
        "lmcache_core/storage/remote/file.py: SharedDirectory.remove.unlink",
        "lmcache_core/storage/remote/redis.py: RedisBackend.batched_remove.UNLINK",
        "lmcache_core/storage/remote/redis.py: RedisBackend.clear.unlink",
        "lmcache_core/storage/write_behind.py: WriteBehind._write.batched_remove",
        "lmcache_storage/admin.py: clear_tenant.clear",
        "lmcache_storage/admin.py: evict_memory.evict",
        "lmcache_storage/chunks.py: delete_chunk.remove",
        "lmcache_storage/s3/objects.py: BucketObjects.clear._delete",
        "lmcache_storage/s3/objects.py: BucketObjects.remove._delete",
        "lmcache_sidecar/admin/status.py: clear_tiers.clear",
        "lmcache_sidecar/admin/status.py: evict_memory.evict",
    ),
    "passes on what a caller asks for": (
        "lmcache_core/storage/disk/backend.py: DiskBackend.batched_remove.remove",
        "lmcache_core/storage/disk/backend.py: DiskBackend.clear.clear",
        "lmcache_core/storage/disk/files.py: DiskFiles.rename.replace",
        "lmcache_core/storage/disk/files.py: DiskFiles.unlink.unlink",
        "lmcache_core/storage/disk/room.py: DiskRoom.set_aside.rename",
        "lmcache_core/storage/disk/room.py: DiskRoom.unlink.unlink",
        "lmcache_core/storage/encoded.py: EncodedBackend.batched_remove.batched_remove",
        "lmcache_core/storage/encoded.py: EncodedBackend.clear.clear",
        "lmcache_core/storage/guard.py: Guard.batched_remove.batched_remove",
        "lmcache_core/storage/guard.py: Guard.clear.clear",
        "lmcache_core/storage/remote/lm.py: LmBackend.batched_remove.remove",
        "lmcache_core/storage/remote/replicas.py: ReplicatedBackend.batched_remove.remove",
        "lmcache_core/storage/served.py: LocalStore.remove.batched_remove",
        "lmcache_core/storage/served.py: LosslessStore.remove.remove",
        "lmcache_core/storage/served.py: WrappedStore.remove.remove",
        "lmcache_core/storage/stack.py: TierStack.batched_remove.batched_remove",
        "lmcache_core/storage/stack.py: TierStack.clear.clear",
        "lmcache_core/wire/server.py: LmSession._answer_to.remove",
        "lmcache_storage/s3/objects.py: BucketObjects._delete.DELETE",
        "lmcache_storage/s3/objects.py: BucketObjects._discard._delete",
        "lmcache_storage/served_store.py: CountedStore.remove.remove",
    ),
    "the eviction policy or a quota needs its room": (
        "lmcache_core/storage/disk/room.py: DiskRoom._give_up_one.unlink",
        "lmcache_core/storage/disk/room.py: DiskRoom._remove_first.unlink",
    ),
    "past its time to live": (
        "lmcache_core/storage/disk/room.py: DiskRoom.expire.unlink",
        "lmcache_storage/s3/objects.py: BucketObjects.find._discard",
    ),
    "its own digest fails in two reads": (
        "lmcache_core/storage/disk/store.py: DiskStore._unreadable.set_aside",
        "lmcache_core/storage/remote/file.py: SharedDirectory._refuse.unlink",
    ),
    "its own digest fails in memory, and its client stores it again": (
        "lmcache_storage/compat/values.py: ForeignValues.get.remove",
    ),
    "its own digest fails in two reads, and the store that holds it vouches for the bytes": (
        "lmcache_core/storage/remote/redis.py: RedisBackend._judge.eval",
        "lmcache_core/storage/remote/redis.py: UNLINK",
        "lmcache_storage/s3/objects.py: BucketObjects._refuse._discard",
    ),
    "no record: the system says that it is no file": (
        "lmcache_core/storage/disk/store.py: DiskStore._hold_refused.set_aside",
    ),
    "written by this call, which reports that it has failed": (
        "lmcache_core/storage/disk/store.py: DiskStore._write_reserved.remove",
    ),
    "a file under a temporary name that never was a record": (
        "lmcache_core/blend/certificate.py: CertificateFolder._remove_abandoned.unlink",
        "lmcache_core/blend/certificate.py: CertificateFolder.save.unlink",
        "lmcache_core/memory/shared.py: ArenaFile.create.ftruncate",
        "lmcache_core/storage/disk/store.py: DiskStore._discard.unlink",
        "lmcache_core/storage/disk/store.py: DiskStore._write_reserved._discard",
        "lmcache_core/storage/disk/store.py: DiskStore.load.unlink",
        "lmcache_core/storage/remote/file.py: SharedDirectory.remove_stale.unlink",
        "lmcache_core/storage/remote/file.py: SharedDirectory.write.unlink",
        "lmcache_sidecar/arena/journal.py: JournalFile.__init__.unlink",
        "lmcache_sidecar/arena/journal.py: JournalFile.drop.unlink",
    ),
    "a whole new one takes its place": (
        "lmcache_core/blend/certificate.py: CertificateFolder.save.replace",
        "lmcache_core/storage/disk/record_file.py: name_record.rename",
        "lmcache_core/storage/encoded.py: EncodedBackend._put.batched_remove",
        "lmcache_core/storage/served.py: LosslessStore.put.remove",
        "lmcache_storage/compat/values.py: ForeignValues.put.remove",
        "lmcache_sidecar/arena/journal.py: ArenaJournal._adopt.rename",
    ),
    "another server has confirmed that it holds the chunk": (
        "lmcache_storage/handover/rebalancer.py: Rebalancer._forget.batched_remove",
    ),
    "no KV: can be made again from what is kept": (
        "lmcache_core/blend/certify.py: load_model.eval",
        "lmcache_core/integrations/file_digests.py: _remember.replace",
        "lmcache_core/integrations/file_digests.py: _remember.unlink",
        "lmcache_core/storage/disk/lock.py: DirectoryLock._lock.ftruncate",
        "lmcache_mover/app.py: _listener.unlink",
        "lmcache_servicekit/problems.py: DELETE",
        "lmcache_servicekit/requests.py: DELETE",
        "lmcache_servicekit/runner.py: Address.announce.replace",
        "lmcache_servicekit/runner.py: Address.retract.unlink",
        "lmcache_sidecar/socket/server.py: SocketServer._replace_dead_socket.unlink",
        "lmcache_sidecar/socket/server.py: SocketServer.close.unlink",
    ),
    "says where chunks are; holders announce them again": (
        "lmcache_core/lookup/client.py: LookupClient.end_instance.DELETE",
        "lmcache_core/p2p/broker_client.py: BrokerClient.deregister.DELETE",
        "lmcache_lookup/index/redis_index.py: RedisIndex.clear.UNLINK",
        "lmcache_lookup/index/redis_scripts.py: DEL",
        "lmcache_lookup/index/redis_scripts.py: HDEL",
        "lmcache_lookup/index/redis_sweeper.py: BucketSweeper._page.UNLINK",
        "lmcache_lookup/routes.py: clear_tenant.clear",
        "lmcache_lookup/routes.py: evict_chunks.evict",
        "lmcache_broker/peers/redis_scripts.py: DEL",
        "lmcache_broker/peers/redis_scripts.py: HDEL",
    ),
    "could not be continued, and the next start would trust it: never wrong comes first": (
        "lmcache_sidecar/arena/journal.py: ArenaJournal._spoil.unlink",
    ),
    "belongs to an arena that is replaced or given up, after no process can read it": (
        "lmcache_core/memory/arena_locks.py: forget_generation.unlink",
        "lmcache_core/memory/shared.py: ArenaFile.create.remove",
        "lmcache_core/memory/shared.py: ArenaFile.remove.unlink",
        "lmcache_core/memory/shared.py: unlink_shared_arena.unlink",
        "lmcache_sidecar/arena/journal.py: discard_journal.unlink",
    ),
}
"""By what allows them, the deletions of each module."""


def sites(path: Path) -> Iterator[str]:
    """Yield `function.call` for each deletion in a module."""

    def walk(node: ast.AST, scope: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*scope, child.name)
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue  # a docstring
            if isinstance(child, ast.Call) and (name := deleting_name(child)):
                yield ".".join((*scope, name))
            if isinstance(child, ast.Constant) and isinstance(child.value, str):
                for command in sorted(set(COMMANDS.findall(child.value))):
                    yield ".".join((*scope, command))
            yield from walk(child, inner)

    return walk(ast.parse(path.read_text(encoding="utf-8")), ())


def deleting_name(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Name):
        return call.func.id if call.func.id in DELETING else None
    if not isinstance(call.func, ast.Attribute):
        return None
    name, holder = call.func.attr, ast.unparse(call.func.value).rpartition(".")[2]
    is_path_replace = name == "replace" and len(call.args) == 1 and not call.keywords
    if name in DELETING or is_path_replace:
        return name
    return name if name in ("remove", "clear", "evict") and holder in STORES else None


def test_every_deletion_has_a_row_and_every_row_a_deletion() -> None:
    found = {
        f"{str(path).rpartition('/src/')[2]}: {site}" for path in SOURCES for site in sites(path)
    }
    rows = [row for allowed in ALLOWED.values() for row in allowed]
    assert sorted(found - set(rows)) == [], "add a row where it says what proves that it may go"
    assert sorted(set(rows) - found) == [], "remove these rows"
    assert len(rows) == len(set(rows)), "a row is there twice"


def test_a_new_deletion_would_be_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "class Tier:\n"
        "    def read(self, path):\n"
        "        try:\n"
        "            return path.read_bytes()\n"
        "        except OSError:\n"
        "            path.unlink()\n"
        "            self._store.remove([path])\n"
        "            self.redis.execute('UNLINK', path)\n"
    )
    assert set(sites(path)) == {"Tier.read.unlink", "Tier.read.remove", "Tier.read.UNLINK"}
