"""Fingerprints of weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_core.integrations.vllm import weights
from lmcache_core.integrations.vllm.weights import adapter_fingerprint, adapter_version, model_fingerprint, options_fingerprint

from tests.fixtures.vllm_engine.worlds import make_adapter, make_model


def fingerprint(model: Path) -> str | None:
    return model_fingerprint(str(model), None, SimpleNamespace())


def safetensors(fills: Mapping[str, bytes]) -> bytes:
    """A file of tensors of 2000 bytes, all the same."""
    entries = {name: {"dtype": "U8", "shape": [2000], "data_offsets": [2000 * i, 2000 * (i + 1)]} for i, name in enumerate(fills)}
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    return len(header).to_bytes(8, "little") + header + b"".join(fill * 2000 for fill in fills.values())


def test_a_model_on_disk_is_told_by_its_files(tmp_path: Path) -> None:
    first, other = make_model(tmp_path / "1"), make_model(tmp_path / "2", "other")
    assert fingerprint(first) == fingerprint(make_model(tmp_path / "3"))
    before = fingerprint(first)
    (first / "config.json").write_text("{}")
    assert fingerprint(first) == before, "what is no weights does not count"
    (first / "second.safetensors").write_text("more")
    assert len({before, fingerprint(first), fingerprint(other)}) == 3


@pytest.mark.parametrize("place", [0, -1])
def test_both_ends_of_a_large_file_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    monkeypatch.setattr(weights, "SAMPLE_BYTES", 16)
    model = make_model(tmp_path, "x" * 100)
    before = fingerprint(model)
    content = bytearray(b"x" * 100)
    content[place] = 0
    (model / "model.safetensors").write_bytes(content)
    assert fingerprint(model) != before


@pytest.mark.parametrize("changed", ["first", "second", "third"])
@pytest.mark.parametrize("is_safe", [True, False])
def test_every_tensor_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, is_safe: bool) -> None:
    """An adapter that has been merged into a model leaves its embeddings and norms as they were, at both ends of the file."""
    monkeypatch.setattr(weights, "SAMPLE_BYTES", 64)

    def fingerprint_of(**fills: bytes) -> str | None:
        model = make_model(tmp_path)
        (model / "model.safetensors").write_bytes(safetensors(fills) if is_safe else b"".join(fill * 2000 for fill in fills.values()))
        return fingerprint(model)

    before = {"embed": b"e", "first": b"1", "second": b"2", "third": b"3", "norm": b"n"}
    assert fingerprint_of(**before) == fingerprint_of(**before) != fingerprint_of(**(before | {changed: b"x"}))


def test_a_header_that_is_none(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    found = set()
    for content in (b"", b"1", b"\x02" + bytes(7) + b"{]", b"\x02" + bytes(7) + b"\xff{}", b"\xff" * 20, safetensors({})):
        (model / "model.safetensors").write_bytes(content)
        found.add(fingerprint(model))
    assert len(found) == 6


def test_a_model_of_many_tensors_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_SPOTS", 10)
    content = BytesIO(safetensors({f"t{i}": b"x" for i in range(100)}))
    assert len(weights._spots(content, len(content.getvalue()))) == 10


def test_a_model_of_one_file(tmp_path: Path) -> None:
    first, other = (make_model(tmp_path / name, name) / "model.safetensors" for name in ("1", "2"))
    assert fingerprint(first) != fingerprint(other)


def test_a_folder_without_weights_says_nothing_of_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint(tmp_path) is None


def test_a_model_on_a_hub_is_told_by_its_commit() -> None:
    def of(revision: str | None, **config: str) -> str | None:
        return model_fingerprint("org/model", revision, SimpleNamespace(**config))

    assert of("main", _commit_hash="abc") == of(None, _commit_hash="abc") != of(None, _commit_hash="def")
    assert of("v1") != of("v2")


@pytest.mark.parametrize("as_method", [True, False])
def test_options_of_the_model_count_and_its_names_do_not(as_method: bool) -> None:
    def of(**options: Any) -> str:
        config = SimpleNamespace(to_dict=lambda: options) if as_method else SimpleNamespace(**options)
        return options_fingerprint(config)

    base = {"rope_theta": 1e4, "text_config": {"layers": 2, "_name_or_path": "a"}}
    same = {"text_config": {"_name_or_path": "b", "layers": 2}, "rope_theta": 1e4, "transformers_version": "5"}
    assert of(**base) == of(**same)
    assert of(**base) != of(**(base | {"rope_theta": 1e5}))
    assert of(**base) != of(**(base | {"text_config": {"layers": 3}}))


def test_an_adapter_is_told_by_its_whole_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SAMPLE_BYTES", 4)
    first = make_adapter(tmp_path / "1", "x" * 50 + "1" + "x" * 50)
    other = make_adapter(tmp_path / "2", "x" * 50 + "2" + "x" * 50)
    assert adapter_fingerprint(first) != adapter_fingerprint(other)
    before = adapter_fingerprint(first)
    (first / "adapter_config.json").write_text('{"r": 8}')
    assert adapter_fingerprint(first) != before


def test_a_version_changes_with_the_files(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path, "one")
    before = adapter_version(adapter)
    assert adapter_version(adapter) == before
    make_adapter(tmp_path, "longer")
    assert adapter_version(adapter) != before
