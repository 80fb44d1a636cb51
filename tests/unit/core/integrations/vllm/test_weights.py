"""Fingerprints of weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_core.integrations.vllm import weights
from lmcache_core.integrations.vllm.weights import adapter_fingerprint, adapter_version, model_fingerprint, options_fingerprint

from tests.fixtures.vllm_engine.worlds import make_adapter, make_model


def fingerprint(model: Path) -> str:
    return model_fingerprint(str(model), None, SimpleNamespace())


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


def test_a_model_on_a_hub_is_told_by_its_commit() -> None:
    def of(revision: str | None, **config: str) -> str:
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
    assert adapter_fingerprint(str(first)) != adapter_fingerprint(str(other))
    before = adapter_fingerprint(str(first))
    (first / "adapter_config.json").write_text('{"r": 8}')
    assert adapter_fingerprint(str(first)) != before
    assert adapter_fingerprint("org/adapter") == "path-org/adapter"


def test_a_version_changes_with_the_files(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path, "one")
    before = adapter_version(str(adapter))
    assert adapter_version(str(adapter)) == before
    make_adapter(tmp_path, "longer")
    assert adapter_version(str(adapter)) != before
    assert adapter_version("org/adapter") == ()
