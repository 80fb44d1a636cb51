"""What was loaded with loss and is stored again keeps its mark."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lmcache_core.engine import transfer
from lmcache_core.engine.transfer import LoadedWithLoss
from lmcache_core.storage.disk import DiskBackend

from tests.fixtures.embedded import PATIENT, Embedded, embedded_engine
from tests.fixtures.kv import HIDDEN, NUM_LAYERS, KVCaches, empty_kv
from tests.fixtures.prompts import tokens_of
from tests.suites.chunks import make_key

TOKENS = tokens_of((0, 1, 2))
NUM_HEADS = 2


def smooth_kv() -> KVCaches:
    base = (
        torch.sin(torch.arange(len(TOKENS)) * 0.3)[:, None, None]
        + torch.arange(HIDDEN).view(1, NUM_HEADS, -1) * 0.1
    )
    return tuple((base * (layer + 1), base * -(layer + 1)) for layer in range(NUM_LAYERS))


def is_same(one: KVCaches, other: KVCaches) -> bool:
    return all(
        torch.equal(a, b)
        for pairs in zip(one, other, strict=True)
        for a, b in zip(*pairs, strict=True)
    )


def load(embedded: Embedded) -> KVCaches:
    kv = empty_kv(len(TOKENS))
    assert embedded.engine.retrieve(TOKENS, kvcaches=kv).all()
    return kv


def test_loss_does_not_lose_its_mark_in_the_serving_engine(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    remote = {"remote_url": f"file://{tmp_path}/shared/"}
    with embedded_engine(remote_serde="cachegen", **remote, **PATIENT) as embedded:
        embedded.engine.store(TOKENS, kvcaches=smooth_kv())
        embedded.drain()
    disk = tmp_path / "disk"
    with embedded_engine(disk, remote_serde="cachegen", **remote, **PATIENT) as embedded:
        kv = load(embedded)
        assert not is_same(kv, smooth_kv())
        embedded.forget_hot()  # and then the engine stores its whole prompt
        embedded.engine.store(TOKENS, kvcaches=kv)
        embedded.drain()
        assert embedded.lower(DiskBackend).stats()["num_chunks"] == 0, (
            "this disk has what has no loss"
        )
    with embedded_engine(disk, **PATIENT) as embedded:
        assert not embedded.engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).any()
        embedded.engine.store(TOKENS, kvcaches=smooth_kv())
        embedded.forget_hot()
        assert is_same(load(embedded), smooth_kv())


def test_what_is_loaded_without_loss_is_exact_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MAX_REMEMBERED_KEYS", 2)
    loaded = LoadedWithLoss()
    keys = [make_key(i).key for i in range(3)]
    for key in keys:
        loaded.note(key, is_lossy=True)
    assert [key in loaded for key in keys] == [False, True, True]
    loaded.note(keys[1], is_lossy=False)
    assert [key in loaded for key in keys] == [False, False, True]
