"""Run as a process of its own, whose children write chunks to a disk tier and kill themselves, each
at the next of the points where it touches a file, until one touches no more.

Usage: disk_writer.py ROOT CAPACITY_BYTES. Each child has a directory of its own there, named by its
    point, and says in a file next to it what it begins and what has been confirmed to it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from pathlib import Path

from lmcache_core.storage.disk import DiskBackend, DiskFiles

from tests.suites.chunks import make_chunk, make_key, make_payload


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


def main(root: Path, capacity_bytes: int) -> int:
    for point in itertools.count():
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(root / f"{point}.said", os.O_WRONLY | os.O_CREAT), 1)
            asyncio.run(write(root / str(point), capacity_bytes, point))
            return 0
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != -signal.SIGKILL:
            return code
    return 1


async def write(root: Path, capacity_bytes: int, point: int) -> None:
    disk = DiskBackend(root, capacity_bytes, fsync=True, num_threads=1, files=KillingFiles(point))
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
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
