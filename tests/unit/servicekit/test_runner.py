"""The command of a service: arguments, exit codes, port file and log lines."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from lmcache_servicekit.logs import JsonFormatter
from lmcache_servicekit.runner import run_service

from tests.fixtures.sample_service import SampleSettings, create_app
from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> int:
    return run_service("lmcache-servicekit", SampleSettings, create_app, arguments)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_print_config_also_checks_the_files_that_settings_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_SAMPLE_TLS_CERT_FILE", str(tmp_path / "tls.crt"))
    monkeypatch.setenv("LMCACHE_SAMPLE_API_SECRET", "hunter2")
    assert run("--print-config") == 2
    printed = capsys.readouterr()
    assert "port: 8099\n" in printed.out
    assert "hunter2" not in printed.out
    [line] = printed.err.splitlines()
    assert f"tls_cert_file={tmp_path / 'tls.crt'}: No such file or directory" in line


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["--nonsense"], 2), (["--conf", "x"], 2)]
)
def test_arguments(arguments: Sequence[str], code: int) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == code


def test_help_says_what_the_service_is_and_lists_its_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    text = capsys.readouterr().out
    assert "Shows what services share." in text
    assert "LMCACHE_SAMPLE_<SETTING>" in text
    for line in (
        "  port (default: 8099; 0…65535)\n      REST.\n",
        "  quota.max_bytes (default: 10)\n      The most.\n",
        "  ratio (default: none; >0…)\n",
        "  labels (default: empty)\n",
        "  log_level (default: info; debug, info, warning, error)\n",
    ):
        assert line in text


def test_a_request_that_outlasts_a_graceful_end_is_answered_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    service = ServiceProcess(
        "tests.fixtures.sample_service",
        tmp_path,
        {"LMCACHE_SAMPLE_PORT": "0", "LMCACHE_SAMPLE_SHUTDOWN_GRACE_S": "1"},
    )
    service.start()
    with socket.create_connection(("127.0.0.1", service.ports["port"]), timeout=60.0) as waiting:
        waiting.sendall(b"GET /v1/hang HTTP/1.1\r\nHost: kit\r\n\r\n")
        httpx.get(f"{service.url}/healthz", trust_env=False, timeout=60)  # the other has begun
        assert service.stop() == 0
        answer = b"".join(iter(lambda: waiting.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"application/problem+json" in answer
    assert "request not answered in time, the process ends: request=GET /v1/hang" in service.output
    assert "Traceback" not in service.output


@pytest.mark.realtime
def test_without_descriptors_a_service_says_so_once_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio's own loop reports each place of the backlog, every second."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "uvloop.py").write_text("raise ImportError")
    paths = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with running_service(
        "tests.fixtures.sample_service",
        tmp_path,
        {"LMCACHE_SAMPLE_PORT": "0", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    ) as service:
        num_open = max(int(one.name) for one in Path(f"/proc/{service.pid}/fd").iterdir()) + 1
        before = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (num_open, before[1]))
        with socket.create_connection(("127.0.0.1", service.ports["port"])):
            time.sleep(3.0)
        assert service.output.count("Too many open files") == 1
        assert service.output.count("\n") < 30
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, before)
        answer = httpx.get(f"{service.url}/healthz", trust_env=False, timeout=30.0)
        assert answer.status_code == 200


def test_service_that_cannot_start_threads_ends_cleanly(tmp_path: Path) -> None:
    with running_service(
        "tests.fixtures.sample_service", tmp_path, {"LMCACHE_SAMPLE_PORT": "0"}
    ) as service:
        [size] = re.findall(r"VmSize:\s*(\d+) kB", Path(f"/proc/{service.pid}/status").read_text())
        limit = int(size) * 2**10 + 4 * 2**20  # less than a thread's stack
        resource.prlimit(service.pid, resource.RLIMIT_AS, (limit, limit))
        assert service.stop() == 0
    assert "Traceback" not in service.output


def test_a_lifespan_that_fails_is_a_failed_start(tmp_path: Path) -> None:
    script = """
import sys
from contextlib import asynccontextmanager
from lmcache_servicekit.app import create_service_app
from lmcache_servicekit.runner import run_service
from tests.fixtures.sample_service import SampleSettings

@asynccontextmanager
async def fail(app):
    raise RuntimeError("no disk")
    yield

run_service("lmcache-servicekit", SampleSettings, lambda s: create_service_app(s, "x", lifespan=fail, routers=[]), sys.argv[1:])
"""  # noqa: E501
    command = [sys.executable, "-c", script, "--port-file", str(tmp_path / "port")]
    environ = os.environ | {"LMCACHE_SAMPLE_PORT": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3
    assert "no disk" in done.stderr
    assert not (tmp_path / "port").exists()


STOP_SLOWLY = """
import asyncio, sys
from contextlib import asynccontextmanager
from lmcache_servicekit.app import create_service_app
from lmcache_servicekit.runner import run_service
from lmcache_servicekit.state import service_state
from tests.fixtures.sample_service import SampleSettings

@asynccontextmanager
async def opened(app):
    async def prepare():
        print("stopping", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    service_state(app).before_stop.append(prepare)
    yield

create = lambda s: create_service_app(s, "x", lifespan=opened, routers=[])
sys.exit(run_service("lmcache-servicekit", SampleSettings, create, sys.argv[1:]))
"""


@contextlib.contextmanager
def stopping_slowly(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has got SIGTERM and does its last work until it reads a line."""
    environ = os.environ | {"LMCACHE_SAMPLE_PORT": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STOP_SLOWLY, "--port-file", str(tmp_path / "port")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environ, **pipes) as process:  # type: ignore[call-overload]
        try:
            wait_until((tmp_path / "port").exists)
            process.terminate()
            assert process.stdout is not None
            assert process.stdout.readline() == b"stopping\n"
            yield process
        finally:
            process.kill()


def test_requests_are_answered_during_the_last_work(tmp_path: Path) -> None:
    with stopping_slowly(tmp_path) as process:
        port = json.loads((tmp_path / "port").read_text())["port"]
        url = f"http://127.0.0.1:{port}/healthz"
        assert httpx.get(url, trust_env=False, timeout=60).status_code == 200
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(tmp_path: Path, number: int) -> None:
    with stopping_slowly(tmp_path) as process:
        process.send_signal(number)
        assert process.wait(60) == 128 + number


def test_json_lines() -> None:
    text = "100%% %s: peer=%s status=%d took_s=%.2f level=%s ratio=%f"
    values = ("b\n", None, 200, 0.125, "x", math.inf)
    line = JsonFormatter().format(
        logging.LogRecord("x", logging.WARNING, "f", 1, text, values, None)
    )
    assert "\n" not in line
    assert json.loads(line) == {
        "time": json.loads(line)["time"],
        "level": "warning",
        "logger": "x",
        "message": text % values,
        "peer": None,
        "status": 200,
        "took_s": 0.125,
        "ratio": "inf",
    }
