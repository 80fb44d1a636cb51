"""`lmcachectl bench` against a real cache_storage: over REST and lm://, and what it leaves behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fixtures.ctl import Ctl
from tests.fixtures.sample_service import ADMIN_TOKEN, CLIENT_TOKEN, write_tokens
from tests.fixtures.service_process import ServiceProcess, running_service

SMALL = ("--seconds", "1", "--size", "64KiB", "--total", "2MiB", "--concurrency", "2")


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[ServiceProcess]:
    tokens = write_tokens(tmp_path / "tokens.yaml", ["bench"])
    (tmp_path / "token").write_text(CLIENT_TOKEN)
    settings = {"PORT": "0", "LM_PORT": "0", "MEMORY_GB": "0.01", "AUTH_TOKENS_FILE": str(tokens)}
    with running_service("lmcache_storage", tmp_path, {f"LMCACHE_STORAGE_{name}": value for name, value in settings.items()}) as service:
        yield service


@pytest.fixture
def ctl(tmp_path: Path) -> Ctl:
    return Ctl([f"--token-file={tmp_path / 'token'}"])


def num_chunks_at(storage: ServiceProcess) -> int:
    headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
    stats = httpx.get(f"{storage.url}/v1/stats", headers=headers, trust_env=False).raise_for_status().json()
    return int(stats["tiers"]["Hot"]["num_chunks"])


def test_what_is_stored_comes_back_and_is_removed(storage: ServiceProcess, ctl: Ctl) -> None:
    for url in (storage.url, f"lm://127.0.0.1:{storage.ports['lm_port']}"):
        found = ctl.json("bench", url, *SMALL)
        store, fetch = found["phases"]
        assert (store["name"], store["num_chunks"], store["num_bytes"]) == ("store", 32, 2 << 20)
        assert fetch["num_chunks"] >= 32
        assert fetch["num_bytes"] == fetch["num_chunks"] << 16
        assert store["failed_calls"] == fetch["failed_calls"] == store["not_done"] == fetch["not_done"] == {}
        assert 0 < fetch["latency_ms"]["p50"] <= fetch["latency_ms"]["p99"] <= fetch["latency_ms"]["max"]
        assert fetch["bytes_per_s"] == pytest.approx(fetch["num_bytes"] / fetch["seconds"], rel=0.01)
        assert (found["num_removed"], found["num_left"]) == (32, 0)
        assert num_chunks_at(storage) == 0


def test_more_than_there_is_room_for_is_told(storage: ServiceProcess, ctl: Ctl) -> None:
    table = ctl.text("bench", f"--storage-url={storage.url}", "--seconds", "1", "--size", "1MiB", "--total", "32MiB")
    assert "32 chunks of 1.0 MiB" in table
    assert "chunks: " in table, "those that were evicted are misses"
    assert "none is left" in table
    assert num_chunks_at(storage) == 0


def test_what_cannot_be_measured_is_one_sentence(storage: ServiceProcess, ctl: Ctl, tmp_path: Path) -> None:
    assert "http://127.0.0.1:9 cannot be used" in ctl.text("bench", "http://127.0.0.1:9", code=1)
    assert "begins with one of lm://" in ctl.text("bench", "redis://h:1", code=2)
    assert "name a cache_storage" in ctl.text("bench", code=2)
    assert "give a smaller --total" in ctl.text("bench", storage.url, "--size", "1KiB", "--total", "1TiB", code=2)
    (tmp_path / "token").write_text("wrong-0123456789abcdef")
    told = ctl.text("bench", f"lm://127.0.0.1:{storage.ports['lm_port']}", code=1)
    assert "cannot be used" in told
    assert "wrong-0123" not in told


def test_one_that_is_interrupted_cleans_up(storage: ServiceProcess, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lmcache_ctl", "bench", storage.url, "--seconds", "60", "--size", "64KiB", "--total", "2MiB"]
    process = subprocess.Popen([*command, f"--token-file={tmp_path / 'token'}"], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while num_chunks_at(storage) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(2)
    _, told = process.communicate(timeout=30)
    assert process.returncode != 0
    assert b"Traceback" not in told
    assert num_chunks_at(storage) == 0
