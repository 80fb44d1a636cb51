"""vLLM's file tier, as the comparison with LMCache and vLLM measures it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.peer_child import Shape
from tests.bench.peer_vllm import Offloading

IN_MEMORY = Path("/dev/shm")
SHAPE = Shape(num_tokens=64, chunk_size=32, num_layers=2, num_heads=2, head_size=64)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Offloading]:
    opened = Offloading(SHAPE, {"type": "fs", "root_dir": str(tmp_path)})
    (made,) = IN_MEMORY.glob(f"vllm_offload_*{opened.engine_id}*")
    yield opened
    opened.close()
    assert not made.exists(), "host memory stays in use"


def test_the_file_tier_brings_back_what_was_stored(files: Offloading) -> None:
    files.store(0)
    files.store(1)
    for turn in (0, 1):
        assert files.retrieve(turn) > 0


def test_a_byte_that_differs_is_noticed(files: Offloading, tmp_path: Path) -> None:
    files.store(0)
    files.store(1)
    for path in tmp_path.rglob("*.bin"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(ValueError, match="other bytes"):
        files.retrieve(0)


def test_vllm_says_what_it_does_not_do_on_a_cpu(files: Offloading) -> None:
    assert "GPUs" in files.refusal(0)
