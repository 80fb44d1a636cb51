"""`lmcachectl top` of real services: once without a terminal, and again and again on one."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from lmcache_ctl import top
from lmcache_ctl.reach import Reach
from lmcache_ctl.settings import CtlSettings
from lmcache_ctl.top import Moment

from tests.fixtures.ctl import SmallCluster
from tests.fixtures.kubernetes_pods import pod, pods_api
from tests.fixtures.kv import CHUNK_SIZE, empty_kv, random_kv, tokens_of
from tests.fixtures.sidecar import engine_at

NUM_CHUNKS = 3


def test_what_happens_in_between_is_told(cluster: SmallCluster) -> None:
    tokens = tokens_of(NUM_CHUNKS * CHUNK_SIZE)
    is_over = threading.Event()
    num_loads = 0

    def load() -> None:
        nonlocal num_loads
        with engine_at(cluster.directory / "s.sock") as engine:
            engine.store(tokens, kvcaches=random_kv(len(tokens)))
            while not is_over.wait(0.02):
                engine.retrieve(tokens, kvcaches=empty_kv(len(tokens)))
                num_loads += 1

    worker = threading.Thread(target=load)
    worker.start()
    try:
        found = cluster.ctl().json("top", "--interval", "0.5")
    finally:
        is_over.set()
        worker.join()
    assert num_loads
    by_kind = {one["kind"]: one for one in found["services"]}
    assert by_kind["sidecar"]["wanted_per_s"] > 0
    assert by_kind["sidecar"]["hit_ratio"] == 1.0
    assert by_kind["sidecar"]["out_bytes_per_s"] > 0
    assert by_kind["sidecar"]["tiers"][0]["num_chunks"] == NUM_CHUNKS
    assert found["seconds"] > 0.4
    assert sorted(link["id"] for link in found["links"]) == ["sidecar", "storage-0", "storage-1"]
    table = cluster.ctl().text("top", "--interval", "0.2")
    assert "5 services, over" in table
    assert "\x1b" not in table


def test_a_terminal_sees_it_refreshed(cluster: SmallCluster) -> None:
    ctl = cluster.ctl()
    command = [sys.executable, "-m", "lmcache_ctl", "top", "--interval", "0.3", *ctl.options]
    near, far = pty.openpty()
    process = subprocess.Popen(
        command,
        stdout=far,
        stderr=far,
        env=os.environ | {"COLUMNS": "160", "LINES": "40", "TERM": "xterm"},
    )
    os.close(far)
    seen, deadline = "", time.monotonic() + 100
    try:
        while (
            len(set(re.findall(r"5 services, over \d+\.\d s", seen))) < 1
            or seen.count("5 services") < 3
        ):
            assert time.monotonic() < deadline, seen
            if select.select([near], [], [], 0.2)[0]:
                seen += os.read(near, 1 << 16).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        while select.select([near], [], [], 5)[0]:
            try:
                seen += os.read(near, 1 << 16).decode(errors="replace")
            except OSError:  # the other end is closed
                break
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(near)
    assert "storage-1" in seen
    assert "Traceback" not in seen


def test_a_pod_that_comes_later_is_seen_and_one_that_goes_is_not(
    cluster: SmallCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "FIND_EVERY_S", 0.0)
    lookup, storage = pod("demo-lookup-0", "lookup", 8081), pod("demo-storage-0", "storage", 8080)
    with pods_api() as api:
        api.pods = [lookup]
        api.ports = {("demo-lookup-0", 8081): cluster.services["lookup"].ports["port"]}
        api.ports["demo-storage-0", 8080] = cluster.services["storage-0"].ports["port"]
        kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
        reach = Reach(CtlSettings(kubeconfig=kubeconfig, token_file=cluster.directory / "token"))

        async def watch() -> list[Moment]:
            seen = []
            watched = top.moments(reach.settings, find, 0.05)
            async for found in watched:
                seen.append(found)
                match len(seen):
                    case 1:
                        api.pods = [lookup, storage]
                    case 3:
                        api.pods = [storage]
                    case 4:
                        api.token = "changed"
                    case 5:
                        break
            await watched.aclose()  # type: ignore[attr-defined]
            return seen

        with reach.finding() as find:
            seen = asyncio.run(watch())
    assert [[one.kind for one in found.services] for found in seen] == [
        ["lookup"], ["lookup", "storage"], ["lookup", "storage"], ["storage"], ["storage"],
    ]  # fmt: skip
    assert [found.services[-1].requests_per_s is None for found in seen] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert [bool(found.problem) for found in seen] == [False] * 4 + [True]
    assert "refuses pods in namespace ns (Unauthorized)" in seen[-1].problem
