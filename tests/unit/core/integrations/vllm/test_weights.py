"""Fingerprints of weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from lmcache_core.integrations.vllm.weights import (
    adapter_fingerprint,
    model_fingerprint,
)

from tests.fixtures.vllm_engine.worlds import make_adapter, make_model

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
