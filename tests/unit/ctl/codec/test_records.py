"""Record files, whole and damaged, as tiers write them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.record import Chunk, RecordHeader, TensorSpec, encode_head, payload_digest
from lmcache_core.serde import create_codec
from lmcache_core.storage.codecs import encoded_chunk
from lmcache_core.storage.disk.files import DiskFiles
from lmcache_core.storage.disk.layout import record_name
from lmcache_core.storage.disk.record_file import write_record
from lmcache_core.telemetry import CodecFigures
from lmcache_ctl.cli import main
from lmcache_ctl.codec.records import inspect_file, record_files
from lmcache_ctl.errors import CtlError

from tests.suites.chunks import make_key

SHAPE = (2, 3, 64, 32)


def raw_chunk(name: str, values: np.ndarray | None = None) -> Chunk:
    if values is None:
        values = np.random.default_rng(1).standard_normal(SHAPE, np.float32)
    payload = values.tobytes()
    key = make_key(name)
    spec = TensorSpec("", "float32", values.shape, 0, len(payload))
    header = RecordHeader(key.key.canonical(), "naive", "", False, (spec,), payload_digest(payload))
    return Chunk(
        key, header, encode_head(header, len(payload)), BytesBufferMemoryObj(payload), "test"
    )


def written(directory: Path, chunk: Chunk) -> Path:
    path = directory / record_name(chunk.key.key)
    write_record(DiskFiles(), path, chunk, fsync=False)
    return path


def encoded_file(directory: Path, serde: str) -> Path:
    codec = create_codec(serde, 1)
    assert codec is not None
    codec.open()
    try:
        chunk = encoded_chunk(codec, raw_chunk(serde), CodecFigures())
    finally:
        codec.close()
    assert chunk is not None
    return written(directory, chunk)


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_raw_record(tmp_path: Path) -> None:
    path = written(tmp_path, raw_chunk("a"))
    found = inspect_file(path)
    assert found.fault == ""
    assert found.file_bytes == path.stat().st_size
    record = found.record
    assert record is not None
    assert (record.key.chunk_hash, record.key.model_name) == (
        make_key("a").key.chunk_hash,
        "test/model",
    )
    assert record.url_key == make_key("a").key.to_url()
    assert (record.serde, record.profile, record.lossy, record.errors) == ("naive", "", False, None)
    assert (record.bits_per_element, record.ratio) == (32.0, 1.0)
    assert record.is_digest_right
    assert record.is_named_after_key


def test_a_lossy_record_tells_its_errors(tmp_path: Path) -> None:
    record = inspect_file(encoded_file(tmp_path, "cachegen:low")).record
    assert record is not None
    assert record.lossy
    assert record.serde == "cachegen"
    assert record.profile.startswith("low@")
    assert record.bits_per_element is not None
    assert 0 < record.bits_per_element < 8
    assert record.ratio == record.raw_bytes / record.encoded_bytes
    assert record.raw_bytes == np.prod(SHAPE) * 4
    assert record.errors is not None
    assert {group.layers.split()[0] for group in record.errors} == {"keys", "values"}
    assert all(0 < group.rms_relative < 1 for group in record.errors)


def test_a_lossless_record_has_no_errors(tmp_path: Path) -> None:
    record = inspect_file(encoded_file(tmp_path, "lossless")).record
    assert record is not None
    assert (record.serde, record.lossy, record.errors) == ("lossless", False, [])


def test_every_flipped_byte_is_seen(tmp_path: Path) -> None:
    path = encoded_file(tmp_path, "lossless")
    whole = path.read_bytes()
    places = [*range(64), 300, 511, 512, 513, len(whole) // 2, len(whole) - 1]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        assert inspect_file(path).fault, place
    path.write_bytes(whole)
    assert inspect_file(path).fault == ""


@pytest.mark.parametrize("length", [0, 1, 23, 24, 100, 511, 512, 600])
def test_a_file_that_was_cut_off(tmp_path: Path, length: int) -> None:
    path = written(tmp_path, raw_chunk("a"))
    path.write_bytes(path.read_bytes()[:length])
    assert inspect_file(path).fault


def test_a_file_that_goes_on(tmp_path: Path) -> None:
    path = written(tmp_path, raw_chunk("a"))
    path.write_bytes(path.read_bytes() + b"x")
    assert "where its head says" in inspect_file(path).fault


def test_a_file_of_another_name_is_whole_but_not_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, raw_chunk("a")).rename(tmp_path / "copy.kvr")
    assert run("codec", "inspect", path) == 0
    assert "not named after its key" in capsys.readouterr().out


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "regular" in inspect_file(tmp_path / "pipe").fault
    assert "cannot be read" in inspect_file(tmp_path / "gone").fault


def test_a_record_that_claims_too_much_takes_no_memory(tmp_path: Path) -> None:
    chunk = raw_chunk("a")
    huge = msgspec.structs.replace(
        chunk.header,
        serde="lossless",
        tensors=(TensorSpec("", "float32", (1 << 40, 1 << 40), 0, chunk.memory.get_size()),),
    )
    payload = bytes(chunk.memory.byte_array)
    path = tmp_path / "x.kvr"
    path.write_bytes(encode_head(huge, len(payload)) + payload)
    assert "not a whole record" in inspect_file(path).fault


def test_directories_are_searched(tmp_path: Path) -> None:
    (tmp_path / "default" / "ab").mkdir(parents=True)
    inner = written(tmp_path / "default" / "ab", raw_chunk("a"))
    outer = written(tmp_path, raw_chunk("b"))
    (tmp_path / "notes.txt").write_text("")
    assert record_files([tmp_path]) == sorted([inner, outer])
    assert record_files([tmp_path / "notes.txt", outer]) == [tmp_path / "notes.txt", outer]


def test_directories_without_records_are_told(tmp_path: Path) -> None:
    with pytest.raises(CtlError, match="no record file"):
        record_files([tmp_path])


def test_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    encoded_file(tmp_path, "cachegen")
    written(tmp_path, raw_chunk("a [bold]"))
    assert run("codec", "inspect", tmp_path) == 0
    told = capsys.readouterr().out
    assert make_key("cachegen").key.chunk_hash in told
    assert "cachegen, lossy, profile standard@" in told
    assert "naive, lossless" in told
    assert "float32 [2, 3, 64, 32]" in told
    assert "keys 0-2: max " in told
    assert told.count("digest     right") == 2
    assert "2 files, 0 with a fault" in told


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = encoded_file(tmp_path, "cachegen")
    damaged = written(tmp_path, raw_chunk("a"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert run("codec", "inspect", path, damaged, "-o", "json") == 1
    first, second = json.loads(capsys.readouterr().out)
    assert first["path"] == str(path)
    assert first["record"]["errors"][0]["layers"] == "keys 0-2"
    assert first["fault"] == ""
    assert second["record"]["is_digest_right"] is False
    assert "digest" in second["fault"]
