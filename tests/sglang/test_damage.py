"""Bytes that are not what was stored: a shorter hit, and never a failed request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.sglang.engines import PAGE_SIZE
from tests.sglang.worlds import (
    TRAINED,
    Pair,
    model_path,
    opened_pair,
    remote_url,
    whole_pages,
)
from tests.vllm.engines import Answer, Ask

LENGTH = 800
DAMAGES = {
    "intact": lambda path, other: None,
    "flipped": lambda path, other: path.write_bytes(_flipped(path.read_bytes())),
    "truncated": lambda path, other: path.write_bytes(path.read_bytes()[:-100]),
    "swapped": lambda path, other: _swap(path, other),
}


def _flipped(record: bytes) -> bytes:
    at = len(record) * 2 // 3
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]


def _swap(path: Path, other: Path) -> None:
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


@pytest.fixture(scope="module")
def pair(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    places = {"arena_path": directory / "arena", "disk_path": directory / "disk", "disk_gb": 0.5}
    one = opened_pair(directory, models, TRAINED, **places)
    yield one
    one.owner.__exit__(None, None, None)


def check(
    pair: Pair, asks: Sequence[Ask], expected: Sequence[Answer], is_damaged: bool = True
) -> None:
    """Ask the second engine: everything is answered, and rightly."""
    answers = [pair.second.generate([ask])[0] for ask in asks]
    assert [one.tokens for one in answers] == [one.tokens for one in expected]
    assert {one.finish_reason for one in answers} == {"length"}
    are_whole = [one.num_cached >= whole_pages(LENGTH) for one in answers]
    assert are_whole == [not is_damaged] * len(asks)


def test_a_byte_flipped_in_memory(pair: Pair) -> None:
    ask = pair.ask(LENGTH)
    expected = pair.filled([ask])
    pair.sidecar.post("/v1/admin/clear", {"tiers": ["disk"]})
    (file,) = [
        path for path in (pair.owner.directory / "arena").iterdir() if path.stat().st_size > 1 << 20
    ]
    with file.open("r+b") as memory:
        for at in range(0, file.stat().st_size, 4096):
            memory.seek(at)
            if any(head := memory.read(8)):
                memory.seek(at)
                memory.write(bytes(byte ^ 0x40 for byte in head))
    check(pair, [ask], expected)
    pair.sidecar.post("/v1/admin/clear", {"tiers": ["memory", "disk"]})


@pytest.mark.parametrize("place", ["disk", "storage-disk"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_records_damaged_on_a_disk(pair: Pair, place: str, damage: str) -> None:
    """On the sidecar's, or on that of the storage."""
    asks = [pair.ask(LENGTH) for _ in range(3)]
    expected = pair.filled(asks)
    if place == "disk":
        pair.storage.post("/v1/admin/clear", {"tenant": "default"})
    else:
        pair.sidecar.post("/v1/admin/clear", {"tiers": ["memory", "disk"]})
    pair.sidecar.kill()
    pair.storage.kill()
    records = sorted(_records(pair.owner.directory / place))
    assert len(records) >= 3 * whole_pages(LENGTH) // PAGE_SIZE
    _damage(records, DAMAGES[damage])
    pair.storage.start()
    arena = pair.owner.directory / f"arena-{place}-{damage}"
    pair.sidecar.start(arena_path=arena, remote_url=remote_url(pair.storage))
    pair.await_hits()
    check(pair, asks, expected, damage != "intact")


def _records(disk: Path) -> list[Path]:
    return [path for path in disk.rglob("*") if path.is_file() and path.stat().st_size > 20_000]


def _damage(records: Sequence[Path], how: Callable[[Path, Path], object]) -> None:
    for one, other in zip(records[::2], records[1::2], strict=False):
        how(one, other)
        if how is not DAMAGES["swapped"]:
            how(other, one)


def test_an_engine_whose_weights_were_replaced_shares_nothing_any_more(pair: Pair) -> None:
    """Although its own cache was not flushed."""
    path = str(model_path(Path(), TRAINED))
    before, after = pair.ask(LENGTH), pair.ask(LENGTH)
    pair.await_hits()
    pair.filled([before])
    assert pair.first.call(60.0, do="update_weights", path=path)
    pair.first.generate([after])
    pair.settle()
    assert pair.second.generate([after])[0].num_cached == 0
    assert pair.second.generate([before])[0].num_cached >= whole_pages(LENGTH)
    assert pair.first.generate([pair.ask(LENGTH)])[0].finish_reason == "length"
