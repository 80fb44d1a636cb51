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

ASKED = "a caller asks for it"
PASSED_ON = "passes on what a caller asks for"
ROOM = "the eviction policy or a quota needs its room"
EXPIRED = "past its time to live"
DIGEST = "its own digest fails in two reads"
DIGEST_ONCE = "its own digest fails in memory, and its client stores it again"
VOUCHED = "its own digest fails in two reads, and the store that holds it vouches for the bytes"
NO_FILE = "no record: the system says that it is no file"
WITHDRAWN = "written by this call, which reports that it has failed"
UNFINISHED = "a file under a temporary name that never was a record"
REPLACED = "a whole new one takes its place"
MOVED = "another server has confirmed that it holds the chunk"
NO_DATA = "no KV: can be made again from what is kept"
INDEX = "says where chunks are; holders announce them again"
STALE = "could not be continued, and the next start would trust it: never wrong comes first"
ENDED = "belongs to an arena that is replaced or given up, after no process can read it"


ALLOWED: Final = {
    "lmcache_core/blend/certificate.py": {
        "CertificateFolder._remove_abandoned.unlink": UNFINISHED,
        "CertificateFolder.save.replace": REPLACED,
        "CertificateFolder.save.unlink": UNFINISHED,
    },
    "lmcache_core/blend/certify.py": {
        "load_model.eval": NO_DATA,
    },
    "lmcache_core/documented/disk.py": {
        "LocalDiskBackend.remove.remove": ASKED,
    },
    "lmcache_core/integrations/vllm/file_digests.py": {
        "_remember.replace": NO_DATA,
        "_remember.unlink": NO_DATA,
    },
    "lmcache_core/lookup/client.py": {
        "LookupClient.end_instance.DELETE": INDEX,
    },
    "lmcache_core/memory/arena_locks.py": {
        "forget_generation.unlink": ENDED,
    },
    "lmcache_core/memory/shared.py": {
        "ArenaFile.create.ftruncate": UNFINISHED,
        "ArenaFile.create.remove": ENDED,
        "ArenaFile.remove.unlink": ENDED,
        "unlink_shared_arena.unlink": ENDED,
    },
    "lmcache_core/p2p/broker_client.py": {
        "BrokerClient.deregister.DELETE": INDEX,
    },
    "lmcache_core/storage/disk/backend.py": {
        "DiskBackend.batched_remove.remove": PASSED_ON,
        "DiskBackend.clear.clear": PASSED_ON,
    },
    "lmcache_core/storage/disk/files.py": {
        "DiskFiles.rename.replace": PASSED_ON,
        "DiskFiles.unlink.unlink": PASSED_ON,
    },
    "lmcache_core/storage/disk/lock.py": {
        "DirectoryLock._lock.ftruncate": NO_DATA,
    },
    "lmcache_core/storage/disk/record_file.py": {
        "name_record.rename": REPLACED,
    },
    "lmcache_core/storage/disk/room.py": {
        "DiskRoom._give_up_one.unlink": ROOM,
        "DiskRoom._remove_first.unlink": ROOM,
        "DiskRoom.expire.unlink": EXPIRED,
        "DiskRoom.set_aside.rename": PASSED_ON,
        "DiskRoom.unlink.unlink": PASSED_ON,
    },
    "lmcache_core/storage/disk/store.py": {
        "DiskStore._discard.unlink": UNFINISHED,
        "DiskStore._hold_refused.set_aside": NO_FILE,
        "DiskStore._unreadable.set_aside": DIGEST,
        "DiskStore._write_reserved._discard": UNFINISHED,
        "DiskStore._write_reserved.remove": WITHDRAWN,
        "DiskStore.clear.remove": ASKED,
        "DiskStore.clear.unlink": ASKED,
        "DiskStore.load.unlink": UNFINISHED,
        "DiskStore.remove.unlink": ASKED,
    },
    "lmcache_core/storage/encoded.py": {
        "EncodedBackend._put.batched_remove": REPLACED,
        "EncodedBackend.batched_remove.batched_remove": PASSED_ON,
        "EncodedBackend.clear.clear": PASSED_ON,
    },
    "lmcache_core/storage/guard.py": {
        "Guard.batched_remove.batched_remove": PASSED_ON,
        "Guard.clear.clear": PASSED_ON,
    },
    "lmcache_core/storage/manager.py": {
        "StorageManager.evict.batched_remove": ASKED,
        "StorageManager.forget.evict": ASKED,
    },
    "lmcache_core/storage/remote/file.py": {
        "SharedDirectory._refuse.unlink": DIGEST,
        "SharedDirectory.clear.unlink": ASKED,
        "SharedDirectory.remove.unlink": ASKED,
        "SharedDirectory.remove_stale.unlink": UNFINISHED,
        "SharedDirectory.write.unlink": UNFINISHED,
    },
    "lmcache_core/storage/remote/lm.py": {
        "LmBackend.batched_remove.remove": PASSED_ON,
    },
    "lmcache_core/storage/remote/redis.py": {
        "RedisBackend._judge.eval": VOUCHED,
        "RedisBackend.batched_remove.UNLINK": ASKED,
        "RedisBackend.clear.unlink": ASKED,
        "UNLINK": VOUCHED,
    },
    "lmcache_core/storage/remote/replicas.py": {
        "ReplicatedBackend.batched_remove.remove": PASSED_ON,
    },
    "lmcache_core/storage/served.py": {
        "LocalStore.remove.batched_remove": PASSED_ON,
        "LosslessStore.put.remove": REPLACED,
        "LosslessStore.remove.remove": PASSED_ON,
        "WrappedStore.remove.remove": PASSED_ON,
    },
    "lmcache_core/storage/stack.py": {
        "TierStack.batched_remove.batched_remove": PASSED_ON,
        "TierStack.clear.clear": PASSED_ON,
    },
    "lmcache_core/storage/write_behind.py": {
        "WriteBehind._write.batched_remove": ASKED,
    },
    "lmcache_core/wire/server.py": {
        "LmSession._answer_to.remove": PASSED_ON,
    },
    "lmcache_storage/admin.py": {
        "clear_tenant.clear": ASKED,
        "evict_memory.evict": ASKED,
    },
    "lmcache_storage/chunks.py": {
        "delete_chunk.remove": ASKED,
    },
    "lmcache_storage/compat/values.py": {
        "ForeignValues.get.remove": DIGEST_ONCE,
        "ForeignValues.put.remove": REPLACED,
    },
    "lmcache_storage/handover/rebalancer.py": {
        "Rebalancer._forget.batched_remove": MOVED,
    },
    "lmcache_storage/s3/objects.py": {
        "BucketObjects._delete.DELETE": PASSED_ON,
        "BucketObjects._discard._delete": PASSED_ON,
        "BucketObjects._refuse._discard": VOUCHED,
        "BucketObjects.clear._delete": ASKED,
        "BucketObjects.find._discard": EXPIRED,
        "BucketObjects.remove._delete": ASKED,
    },
    "lmcache_storage/served_store.py": {
        "CountedStore.remove.remove": PASSED_ON,
    },
    "lmcache_lookup/index/redis_index.py": {
        "RedisIndex.clear.UNLINK": INDEX,
    },
    "lmcache_lookup/index/redis_scripts.py": {
        "DEL": INDEX,
        "HDEL": INDEX,
    },
    "lmcache_lookup/index/redis_sweeper.py": {
        "BucketSweeper._page.UNLINK": INDEX,
    },
    "lmcache_lookup/routes.py": {
        "clear_tenant.clear": INDEX,
        "evict_chunks.evict": INDEX,
    },
    "lmcache_broker/peers/redis_scripts.py": {
        "DEL": INDEX,
        "HDEL": INDEX,
    },
    "lmcache_servicekit/problems.py": {
        "DELETE": NO_DATA,
    },
    "lmcache_servicekit/requests.py": {
        "DELETE": NO_DATA,
    },
    "lmcache_servicekit/runner.py": {
        "Address.announce.replace": NO_DATA,
        "Address.retract.unlink": NO_DATA,
    },
    "lmcache_sidecar/admin/status.py": {
        "clear_tiers.clear": ASKED,
        "evict_memory.evict": ASKED,
    },
    "lmcache_sidecar/arena/journal.py": {
        "ArenaJournal._adopt.rename": REPLACED,
        "ArenaJournal._spoil.unlink": STALE,
        "JournalFile.__init__.unlink": UNFINISHED,
        "JournalFile.drop.unlink": UNFINISHED,
        "discard_journal.unlink": ENDED,
    },
    "lmcache_sidecar/socket/server.py": {
        "SocketServer._replace_dead_socket.unlink": NO_DATA,
        "SocketServer.close.unlink": NO_DATA,
    },
}


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
    found = {(str(path).rpartition("/src/")[2], site) for path in SOURCES for site in sites(path)}
    allowed = {(module, site) for module, rows in ALLOWED.items() for site in rows}
    assert sorted(found - allowed) == [], "add a row with what proves that it may go"
    assert sorted(allowed - found) == [], "remove these rows"


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
