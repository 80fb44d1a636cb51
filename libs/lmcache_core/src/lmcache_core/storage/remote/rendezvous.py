"""Rendezvous hashing, which chooses a chunk's home among several servers.

Every server has a score for every chunk, and the best is the chunk's home. When a server joins,
only the chunks that it wins move, to it; when one leaves, only its own chunks move, each to its
second choice. Golden vectors: `tests/contract/golden/rendezvous.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash


def ranked(names: Iterable[str], chunk_id: bytes) -> list[str]:
    """Return all servers for a chunk, best first: its home, its second choice, and so on. The same
    in every process.

    Args:
        names: Names of the servers, in any order, each once.
        chunk_id: 16 bytes.
    """
    return sorted(names, key=lambda name: (-score(name, chunk_id), name))


def home(names: Sequence[str], chunk_id: bytes) -> str:
    """Return the first of `ranked`. `names` must not be empty."""
    return (
        names[0] if len(names) == 1 else min(names, key=lambda name: (-score(name, chunk_id), name))
    )


def score(name: str, chunk_id: bytes) -> int:
    """Return a server's score for a chunk: xxh3-64 over the name in UTF-8, a zero byte and the
    chunk id.
    """
    return xxhash.xxh3_64_intdigest(b"%b\0%b" % (name.encode(), chunk_id))
