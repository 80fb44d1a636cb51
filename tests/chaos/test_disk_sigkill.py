"""SIGKILL at every point where the disk tier touches a file: what was confirmed is served again,
and nothing wrong is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lmcache_core.record import MissReason
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.disk.layout import BLOCK_BYTES

from tests.suites.backend_suite import Arena, payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload

WRITER = "tests.chaos.disk_writer"
CAPACITY_BYTES = 4 * BLOCK_BYTES
VALID = {
    "a": [make_payload("a")],
    "b": [make_payload("b")],
    "c": [make_payload("c")],
    "d": [make_payload("d")],
    "lossy": [make_payload("lossy"), make_payload("lossless", 1100)],
}


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


async def test_every_point_of_death_leaves_a_sound_directory(tmp_path):
    command = [sys.executable, "-m", WRITER, str(tmp_path), str(CAPACITY_BYTES)]
    subprocess.run(command, check=True, timeout=100)
    num_points = len(list(tmp_path.glob("*.said")))
    assert num_points > 60, "the writer has more points than that"
    for point in range(num_points):
        said = (tmp_path / f"{point}.said").read_text().splitlines()
        assert ("end" in said) == (point == num_points - 1), f"point {point}: {said}"
        await check(tmp_path / str(point), said)
