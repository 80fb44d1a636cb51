"""`lmcachectl codec` beside a real sidecar that encodes for its disk and its remote tier."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.fixtures.ctl import Ctl
from tests.fixtures.kv import CHUNK_SIZE, empty_kv, random_kv, tokens_of
from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.sidecar import engine_at

NUM_CHUNKS = 3
TIMEOUT_S = 60


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ServiceProcess]:
    (tmp_path / "remote").mkdir()
    settings = {
        "PORT": "0",
        "LM_PORT": "0",
        "ARENA_GB": "0.01",
        "ARENA_PATH": str(tmp_path / "arena"),
        "SOCKET_PATH": str(tmp_path / "s.sock"),
        "DISK_PATH": str(tmp_path / "disk"),
        "DISK_GB": "0.01",
        "DISK_SERDE": "lossless",
        "REMOTE_URL": f"file://{tmp_path / 'remote'}",
        "REMOTE_SERDE": "cachegen",
    }
    with running_service(
        "lmcache_sidecar",
        tmp_path,
        {f"LMCACHE_SIDECAR_{name}": value for name, value in settings.items()},
    ) as service:
        yield service


def ctl(*arguments: str | Path, code: int = 0) -> Any:
    return Ctl().json("codec", *arguments, code=code)


def settle(service: ServiceProcess) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not httpx.get(f"{service.url}/v1/status", trust_env=False).json()["settled"]:
        assert time.monotonic() < deadline, service.output
        time.sleep(0.05)


def test_stats_and_files_tell_the_same(sidecar: ServiceProcess, tmp_path: Path) -> None:
    assert ctl("stats", "--url", sidecar.url)["serdes"] == []
    tokens = tokens_of(NUM_CHUNKS * CHUNK_SIZE)
    with engine_at(tmp_path / "s.sock") as engine:
        engine.store(tokens, kvcaches=random_kv(len(tokens)))
        settle(sidecar)
        stats = ctl("stats", "--url", sidecar.url)
        lossy, lossless = ctl("inspect", tmp_path / "remote"), ctl("inspect", tmp_path / "disk")

        httpx.post(
            f"{sidecar.url}/v1/admin/evict", json={"num_bytes": 1 << 30}, trust_env=False
        ).raise_for_status()
        assert engine.retrieve(tokens, kvcaches=empty_kv(len(tokens))).sum() == len(tokens)
        decoded = {
            activity["name"]: activity["decoded"]["num_chunks"]
            for activity in ctl("stats", "--url", sidecar.url)["serdes"]
        }

    assert stats["tiers_hidden"] == ""
    by_serde = {activity["name"]: activity["encoded"] for activity in stats["serdes"]}
    by_tier = {activity["name"]: activity["encoded"] for activity in stats["tiers"]}
    for files, serde, tier in (
        (lossy, "cachegen", "storage"),
        (lossless, "lossless", "disk"),
    ):
        assert [file["fault"] for file in files] == [""] * NUM_CHUNKS
        records = [file["record"] for file in files]
        assert {record["serde"] for record in records} == {serde}
        assert all(record["is_named_after_key"] for record in records)
        for work in (by_serde[serde], by_tier[tier]):
            assert work["num_chunks"] == NUM_CHUNKS
            assert work["raw_bytes"] == sum(record["raw_bytes"] for record in records)
            assert work["encoded_bytes"] == sum(record["encoded_bytes"] for record in records)
            assert work["ratio"] > 1
    [errors] = stats["errors"]
    assert errors["profile"] == "cachegen/" + lossy[0]["record"]["profile"].partition("@")[0]
    worst = max(layers["rms_relative"] for file in lossy for layers in file["record"]["errors"])
    assert errors["worst_rms_relative"] == pytest.approx(worst)
    assert decoded == {"cachegen": 0, "lossless": NUM_CHUNKS}


def test_a_damaged_file_is_found_before_the_sidecar_finds_it(
    sidecar: ServiceProcess, tmp_path: Path
) -> None:
    tokens = tokens_of(NUM_CHUNKS * CHUNK_SIZE)
    kv = random_kv(len(tokens))
    with engine_at(tmp_path / "s.sock") as engine:
        engine.store(tokens, kvcaches=kv)
        settle(sidecar)
        victim = sorted((tmp_path / "remote").rglob("*.kvr"))[0]
        content = bytearray(victim.read_bytes())
        content[-1] ^= 1
        victim.write_bytes(content)
        files = ctl("inspect", tmp_path / "remote", code=1)
        assert [file["path"] for file in files if file["fault"]] == [str(victim)]
        got = empty_kv(len(tokens))
        engine.retrieve(tokens, kvcaches=got)
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(got, kv, strict=True))
