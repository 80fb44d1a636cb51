"""Run as a process of its own: writes chunks to a disk tier and kills itself at one of the points
where it touches a file.

Usage: disk_writer.py ROOT CAPACITY_BYTES POINT. Says on stdout what it begins and what has been
    confirmed to it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.testing.chunks import make_chunk, make_key, make_payload


class KillingFiles(DiskFiles):
    """Counts points, before and after every operation that changes something (and in the middle
    of writes).
    """

    def __init__(self, deadly_point: int) -> None:
        self._left = deadly_point

    def point(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def write(self, fd, buffers):
        self.point()
        super().write(fd, [bytes(buffers[0])[:100]])
        self.point()
        super().write(fd, [bytes(buffers[0])[100:], memoryview(buffers[1])[:333]])
        self.point()
        super().write(fd, [memoryview(buffers[1])[333:]])
        self.point()


def _with_points(name):
    def operation(self, *arguments):
        self.point()
        result = getattr(DiskFiles, name)(self, *arguments)
        self.point()
        return result

    return operation


for _name in ("make_directory", "create", "sync", "rename", "sync_directory", "unlink"):
    setattr(KillingFiles, _name, _with_points(_name))


def say(*words: str) -> None:
    os.write(1, (" ".join(words) + "\n").encode())


async def main(root: str, capacity_bytes: str, point: str) -> None:
    disk = DiskBackend(
        Path(root), int(capacity_bytes), fsync=True, num_threads=1, files=KillingFiles(int(point))
    )
    await disk.open()
    for name in ("a", "b"):
        await store(disk, name)
    await disk.batched_put([make_chunk("lossy", payload=make_payload("lossy"), lossy=True)])
    await disk.batched_put([make_chunk("lossy", payload=make_payload("lossless", 1100))])
    say("kept", "lossy")
    await store(disk, "c")
    await store(disk, "d")
    say("begin", "remove b")
    await disk.batched_remove([make_key("b")])
    say("removed", "b")
    say("end")


async def store(disk: DiskBackend, name: str) -> None:
    say("begin", name)
    [is_kept] = await disk.batched_put([make_chunk(name)])
    assert is_kept
    say("kept", name)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
