"""Fingerprints of weights, and digests of whole files: read once, and again when a file may have
changed.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from lmcache_core.errors import LayoutError
from lmcache_core.integrations import file_digests as module
from lmcache_core.integrations.file_digests import file_digests
from lmcache_core.integrations.weights import adapter_fingerprint, model_fingerprint

from tests.fixtures.vllm_engine.worlds import make_adapter, make_model
from tests.fixtures.waiting import wait_until

COMMIT, OTHER = "0a" * 20, "0b" * 20


def fingerprint(model: Path) -> str | None:
    return model_fingerprint(str(model), None, SimpleNamespace())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What has been downloaded: one commit of one model, which is `main`."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--model"
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return repository


def of_hub(revision: str | None, name: str = "org/model", **config: str) -> str | None:
    return model_fingerprint(name, revision, SimpleNamespace(**config))


def test_model_on_disk_is_named_by_its_files(tmp_path: Path) -> None:
    first, other = make_model(tmp_path / "1"), make_model(tmp_path / "2", "other")
    assert fingerprint(first) == fingerprint(make_model(tmp_path / "3"))
    before = fingerprint(first)
    (first / "second.safetensors").write_text("more")
    assert len({before, fingerprint(first), fingerprint(other)}) == 3
    one_file = [fingerprint(model / "model.safetensors") for model in (first, other)]
    assert one_file[0] != one_file[1]


@pytest.mark.parametrize("place", [0, 777_777, -1])
def test_every_byte_counts(tmp_path: Path, place: int) -> None:
    model = make_model(tmp_path)
    content = bytearray(bytes(3 << 20))
    found = set()
    for _ in range(2):
        (model / "model.safetensors").write_bytes(content)
        found.add(fingerprint(model))
        content[place] ^= 1
    assert len(found) == 2


@pytest.mark.parametrize(
    "name", ["hf_quant_config.json", "modeling_own.py", "model.safetensors.index.json", "new.dat"]
)
def test_any_other_file_of_a_model_counts(tmp_path: Path, name: str) -> None:
    model = make_model(tmp_path)
    before = fingerprint(model)
    (model / name).write_text("{}")
    added = fingerprint(model)
    (model / name).write_text('{"bits": 4}')
    assert len({before, added, fingerprint(model)}) == 3


@pytest.mark.parametrize(
    "name", ["README.md", "LICENSE", "tokenizer_config.json", "vocab.txt", ".gitignore"]
)
def test_texts_and_tokenizers_do_not_count(tmp_path: Path, name: str) -> None:
    model, adapter = make_model(tmp_path), make_adapter(tmp_path / "adapter", "one")
    before = fingerprint(model), adapter_fingerprint(adapter)
    for folder in (model, adapter):
        (folder / name).write_text("other words")
    assert (fingerprint(model), adapter_fingerprint(adapter)) == before


def test_configuration_does_not_count_and_is_no_weight(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    before = fingerprint(model)
    (model / "config.json").write_text("{}")
    assert fingerprint(model) == before
    (model / "model.safetensors").unlink()
    assert fingerprint(model) is None


def test_model_on_a_hub_is_named_by_its_commit(hub: Path) -> None:
    assert (
        of_hub("main", _commit_hash=COMMIT)
        == of_hub(None, _commit_hash=COMMIT)
        != of_hub(None, _commit_hash=OTHER)
    )
    assert of_hub(COMMIT) == of_hub(None) == of_hub("main"), "the downloaded files name it, too"
    (hub / "refs" / "main").write_text(OTHER)
    (hub / "snapshots" / OTHER).mkdir()
    assert of_hub(None) != of_hub(COMMIT)


@pytest.mark.parametrize("revision", [None, "v1"])
def test_branch_of_a_hub_names_no_weights(hub: Path, revision: str | None) -> None:
    """It may be other ones tomorrow, under the same name."""
    assert of_hub(revision, "org/other") is None
    assert of_hub(OTHER, "org/other") is not None


def test_adapter_is_named_by_its_whole_content(tmp_path: Path) -> None:
    first = make_adapter(tmp_path / "1", "x" * 50 + "1" + "x" * 50)
    other = make_adapter(tmp_path / "2", "x" * 50 + "2" + "x" * 50)
    assert adapter_fingerprint(first) != adapter_fingerprint(other)
    before = adapter_fingerprint(first)
    (first / "adapter_config.json").write_text('{"r": 8}')
    assert adapter_fingerprint(first) != before


LONG_AGO_S = 1_000_000_000
PATIENCE_S = 60.0


class Reads:
    """Counts the segments that are read.

    Attributes:
        before_each: Called before a segment is read.
    """

    def __init__(self) -> None:
        self.count = 0
        self.before_each: Callable[[], object] = lambda: None

    def hash(self, make: Callable[[], object]) -> Callable[[], object]:
        def noted() -> object:
            self.count += 1
            self.before_each()
            return make()

        return noted


@pytest.fixture(autouse=True)
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Files of any size are remembered, however young they are."""
    found = Reads()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "MIN_REMEMBERED_BYTES", 0)
    monkeypatch.setattr(module, "SETTLED_S", -LONG_AGO_S)
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(module, "READ_BYTES", 300)
    monkeypatch.setattr(module.xxhash, "xxh3_128", found.hash(module.xxhash.xxh3_128))
    return found


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three files in five segments."""
    folder = tmp_path / "model"
    folder.mkdir()
    paths = [folder / f"{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * (1100 * number))
    return paths


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "lmcache"


def test_files_are_read_once(files: list[Path], reads: Reads) -> None:
    first = file_digests(files)
    assert reads.count == 5
    assert file_digests(files) == first
    assert reads.count == 5


def copy_with_times(path: Path) -> None:
    """The inode, and when it was changed, cannot be set."""
    stat, other = path.stat(), path.with_suffix(".new")
    other.write_bytes(b"y" * stat.st_size)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize(
    ("change", "is_other"),
    [
        (lambda path: path.write_bytes(b"x" * path.stat().st_size), True),
        (lambda path: os.utime(path, (LONG_AGO_S, LONG_AGO_S)), False),
        (copy_with_times, True),
    ],
    ids=["content", "times", "copy"],
)
def test_file_that_may_have_changed_is_read_again(
    files: list[Path], reads: Reads, change: Callable[[Path], object], is_other: bool
) -> None:
    before = file_digests(files)
    change(files[1])
    assert (file_digests(files) != before) == is_other
    assert reads.count == 10


def test_recently_changed_file_is_not_remembered(
    files: list[Path], reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within the clock's tick would go unnoticed."""
    monkeypatch.setattr(module, "SETTLED_S", LONG_AGO_S)
    file_digests(files)
    file_digests(files)
    assert reads.count == 10


def test_file_that_changes_meanwhile_is_refused(files: list[Path], reads: Reads) -> None:
    reads.before_each = lambda: files[1].write_bytes(b"written meanwhile")
    with pytest.raises(LayoutError, match="changes while it is being read"):
        file_digests(files)


def test_concurrent_processes_read_once_and_log_their_progress(
    files: list[Path],
    reads: Reads,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "PROGRESS_S", 0.0)
    monkeypatch.setattr(module, "LOCK_POLL_S", 0.01)
    may_read, found = threading.Event(), list[list[str]]()
    reads.before_each = lambda: may_read.wait(PATIENCE_S)
    threads = [threading.Thread(target=lambda: found.append(file_digests(files))) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: "waiting for another process" in caplog.text)
    may_read.set()
    for thread in threads:
        thread.join()
    assert found == [found[0]] * 4
    assert reads.count == 5
    lines = [record for record in caplog.records if record.msg.startswith("reading weights: gb=")]
    assert len(lines) == 5, "one for each segment"
    assert lines[-1].args == (3300 / 1e9, 3300 / 1e9)


@pytest.mark.parametrize("damage", [b"", b"{}", b'[[[1,2,3,4,5],""]]', b"\xff"])
def test_damaged_memory_is_ignored(files: list[Path], cache: Path, damage: bytes) -> None:
    before = file_digests(files)
    (memory,) = cache.glob("*.json")
    memory.write_bytes(damage)
    assert file_digests(files) == before


def test_memory_that_other_users_can_write_is_ignored(
    files: list[Path], reads: Reads, cache: Path
) -> None:
    file_digests(files)
    cache.chmod(0o777)
    file_digests(files)
    assert reads.count == 10


def test_files_are_read_without_a_cache_directory(
    files: list[Path], reads: Reads, cache: Path
) -> None:
    cache.parent.write_text("a file is in its place")
    assert file_digests(files) == file_digests(files)
    assert reads.count == 10


def test_memory_is_bounded(files: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 2)
    for count in (1, 2, 3):
        file_digests(files[:count])
    assert len(list(cache.glob("*.json"))) == 2


def test_caller_that_must_not_wait_reads_at_once(
    files: list[Path], reads: Reads, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = file_digests(files)
    (remembered,) = cache.glob("*.json")
    remembered.unlink()
    monkeypatch.setattr(module.time, "sleep", pytest.fail)
    (lock,) = cache.glob("*.lock")
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as another process that reads the files
        assert file_digests(files, lock_wait_s=0.0) == expected
        assert reads.count == 10
        assert file_digests(files, lock_wait_s=0.0) == expected
    assert reads.count == 10, "it is remembered all the same"
