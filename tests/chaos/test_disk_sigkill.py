"""SIGKILL at every point where the disk tier touches a file: what was confirmed is served again,
and nothing wrong is.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lmcache_core.record import MissReason
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.disk.layout import BLOCK_BYTES
from lmcache_core.testing.backend_suite import Arena, payload_of
from lmcache_core.testing.chunks import make_chunk, make_key, make_payload

WRITER = Path(__file__).with_name("disk_writer.py")
CAPACITY_BYTES = 4 * BLOCK_BYTES
NUM_AT_ONCE = 2
VALID = {
    "a": [make_payload("a")],
    "b": [make_payload("b")],
    "c": [make_payload("c")],
    "d": [make_payload("d")],
    "lossy": [make_payload("lossy"), make_payload("lossless", 1100)],
}


def start(root: Path, point: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(WRITER), str(root), str(CAPACITY_BYTES), str(point)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def expected_after(said: list[str]) -> set[str]:
    """What must be served: everything confirmed, less what has since been told to go, or to make
    room.
    """
    kept = {line.removeprefix("kept ") for line in said if line.startswith("kept ")}
    if "begin d" in said:
        kept.discard("a")
    if "begin remove b" in said:
        kept.discard("b")
    return kept


async def check(root: Path, said: list[str]) -> None:
    disk = DiskBackend(root, CAPACITY_BYTES)
    await disk.open()
    try:
        results = [
            payload_of(result)
            for result in await disk.batched_get([make_key(name) for name in VALID], Arena())
        ]
        served = {}
        for name, result in zip(VALID, results, strict=True):
            if result is not MissReason.NEVER_STORED:
                assert result in VALID[name], f"{name} is served with wrong bytes or is damaged"
                served[name] = result
        assert expected_after(said) <= served.keys()
        assert "removed b" not in said or "b" not in served
        if "kept lossy" in said:
            assert served["lossy"] == make_payload("lossless", 1100)
        assert disk.stats()["damaged_at_start"] == 0
        lying = [path for path in root.rglob("*") if path.is_file() and path.name != ".lock"]
        assert all(path.suffix == ".kvr" for path in lying), "something half-written is left"
        assert len(lying) * BLOCK_BYTES == disk.stats()["used_bytes"] <= CAPACITY_BYTES
        disk.check_integrity()
        assert await disk.batched_put([make_chunk("after")]) == [True]
    finally:
        await disk.close()


@pytest.mark.timeout(300)
async def test_every_point_of_death_leaves_a_sound_directory(tmp_path):
    point, survived = 0, False
    while not survived:
        batch = [
            (number, start(tmp_path / str(number), number))
            for number in range(point, point + NUM_AT_ONCE)
        ]
        for number, process in batch:
            said = process.communicate(timeout=60)[0].splitlines()
            assert process.returncode in (-signal.SIGKILL, 0)
            assert (process.returncode == 0) == ("end" in said), f"point {number}: {said}"
            await check(tmp_path / str(number), said)
            survived |= process.returncode == 0
        point += NUM_AT_ONCE
    assert point > 60, "the writer has more points than that"
