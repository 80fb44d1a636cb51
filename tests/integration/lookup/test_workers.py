"""Several workers behind one port: real processes, a real Redis, and signals that cannot be
caught.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fixtures.redis_server import RedisServer, running_redis
from tests.fixtures.service_process import ServiceProcess, running_service

NUM_WORKERS = 2


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as redis_server:
        yield redis_server


@pytest.fixture
def service(server: RedisServer, tmp_path: Path) -> Iterator[ServiceProcess]:
    environ = {
        "LMCACHE_LOOKUP_PORT": "0",
        "LMCACHE_LOOKUP_REDIS_URL": server.url,
        "LMCACHE_LOOKUP_WORKERS": str(NUM_WORKERS),
    }
    with running_service("lmcache_lookup", tmp_path, environ) as process:
        yield process
    assert "Traceback" not in process.output


@pytest.fixture(scope="module")
def plain() -> Iterator[httpx.Client]:
    """Every request has a connection of its own, which the kernel gives to any of the workers."""
    with httpx.Client(
        trust_env=False, timeout=10, limits=httpx.Limits(max_keepalive_connections=0)
    ) as client:
        yield client


def metrics(plain: httpx.Client, service: ServiceProcess) -> str:
    return plain.get(f"{service.url}/metrics").text


def answered_by_worker(plain: httpx.Client, service: ServiceProcess) -> Counter[str]:
    """Requests of `/healthz` that each worker has counted."""
    found: Counter[str] = Counter()
    for labels, value in re.findall(
        r"^lmcache_http_requests_total\{(.*)\} (\S+)$", metrics(plain, service), re.MULTILINE
    ):
        if 'route="/healthz"' in labels:
            found[re.findall(r'worker="(\d+)"', labels)[0]] += int(float(value))
    return found


def workers_of(pid: int) -> list[int]:
    return [
        int(child)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if is_alive(int(child))
    ]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def test_all_workers_answer_and_whichever_is_asked_tells_the_metrics_of_all(
    plain: httpx.Client, service: ServiceProcess
) -> None:
    for _ in range(64):
        assert plain.get(f"{service.url}/healthz").status_code == 200
    counts = answered_by_worker(plain, service)
    assert set(counts) == {"0", "1"}
    assert sum(counts.values()) == 64
    assert all(answered_by_worker(plain, service) == counts for _ in range(8))
    text = metrics(plain, service)
    assert 'lmcache_worker_up{worker="0"} 1.0' in text
    assert 'lmcache_worker_up{worker="1"} 1.0' in text
    assert text.count("# TYPE lmcache_http_requests_total counter") == 1
    assert (
        len(re.findall(r"^process_resident_memory_bytes\{worker=", text, re.MULTILINE))
        == NUM_WORKERS
    )


def test_a_worker_that_is_killed_is_replaced(plain: httpx.Client, service: ServiceProcess) -> None:
    first = set(workers_of(service.pid))
    assert len(first) == NUM_WORKERS
    killed = min(first)
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: len(set(workers_of(service.pid)) - {killed}) == NUM_WORKERS)
    eventually(
        lambda: (
            "lmcache_worker_up" in metrics(plain, service)
            and metrics(plain, service).count("lmcache_worker_up{") == NUM_WORKERS
        )
    )
    eventually(
        lambda: (
            'lmcache_worker_up{worker="0"} 1.0' in metrics(plain, service)
            and 'lmcache_worker_up{worker="1"} 1.0' in metrics(plain, service)
        )
    )
    assert "worker ended, replacing it" in service.output


def test_a_worker_that_hangs_is_shown_and_does_not_hold_the_others_up(
    plain: httpx.Client, service: ServiceProcess
) -> None:
    hung = workers_of(service.pid)[0]
    os.kill(hung, signal.SIGSTOP)
    try:
        told = (_metrics_or_none(plain, service) for _ in range(12))
        assert any(
            re.search(r'^lmcache_worker_up\{worker="\d"\} 0\.0$', text, re.MULTILINE)
            for text in told
            if text is not None
        )
    finally:
        os.kill(hung, signal.SIGCONT)
    eventually(
        lambda: (
            "} 0.0"
            not in "".join(
                re.findall(r"^lmcache_worker_up.*$", metrics(plain, service), re.MULTILINE)
            )
        )
    )


def _metrics_or_none(plain: httpx.Client, service: ServiceProcess) -> str | None:
    """None when the kernel gave the connection to the worker that hangs."""
    try:
        return plain.get(f"{service.url}/metrics", timeout=8.0).text
    except httpx.TimeoutException:
        return None


def test_all_end_gracefully_and_the_port_file_goes(service: ServiceProcess, tmp_path: Path) -> None:
    workers = workers_of(service.pid)
    assert service.stop() == 0
    assert not any(is_alive(worker) for worker in workers)
    assert not list(tmp_path.glob("*.port"))


def test_workers_end_with_their_parent(service: ServiceProcess) -> None:
    workers = workers_of(service.pid)
    os.kill(service.pid, signal.SIGKILL)
    eventually(lambda: not any(is_alive(worker) for worker in workers))


def test_workers_need_a_shared_index() -> None:
    environ = {**os.environ, "LMCACHE_LOOKUP_PORT": "0", "LMCACHE_LOOKUP_WORKERS": "2"}
    ended = subprocess.run(
        [sys.executable, "-m", "lmcache_lookup"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert (
        "workers=2: an index in the process cannot be shared; set redis_url, or workers=1"
        in ended.stderr
    )


def test_a_port_that_is_taken_is_not_shared(service: ServiceProcess, server: RedisServer) -> None:
    port = str(service.ports["port"])
    environ = {
        **os.environ,
        "LMCACHE_LOOKUP_PORT": port,
        "LMCACHE_LOOKUP_WORKERS": "2",
        "LMCACHE_LOOKUP_REDIS_URL": server.url,
    }
    ended = subprocess.run(
        [sys.executable, "-m", "lmcache_lookup"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, "cannot listen" in ended.stderr) == (2, True)
