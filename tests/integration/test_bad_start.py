"""What only the start can find wrong ends a service with code 2 and one sentence that names the
option; and what a service that starts says of its addresses.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fixtures.forked_services import ForkedService
from tests.fixtures.service_process import running_service
from tests.fixtures.waiting import until

TAKEN, HERE = "<taken>", "<here>"
REDIS = "redis://user:hunter2@127.0.0.1:1"
BROKER = {"PORT": "0"}
LOOKUP = {"PORT": "0"}
STORAGE = {"PORT": "0", "LM_PORT": "0", "MEMORY_GB": "0.01"}
COMPAT = {"LMCACHE_COMPAT_PORT": "0", "LMCACHE_COMPAT_TENANT": "foreign"}
SIDECAR = {
    "PORT": "0",
    "LM_PORT": "0",
    "ARENA_GB": "0.01",
    "SOCKET_PATH": f"{HERE}/s.sock",
    "ARENA_PATH": f"{HERE}/arena",
}
CASES: list[tuple[str, Mapping[str, str], str]] = [
    ("lookup", LOOKUP | {"PORT": TAKEN}, "port"),
    ("lookup", LOOKUP | {"HOST": "192.0.2.1", "ALLOW_ANONYMOUS": "true"}, "host"),
    ("broker", BROKER | {"HEALTH_PORT": TAKEN}, "health_port"),
    ("storage", STORAGE | {"LM_PORT": TAKEN}, "lm_port"),
    ("storage", STORAGE | COMPAT | {"LMCACHE_COMPAT_PORT": TAKEN}, "lmcache_compat_port"),
    ("storage", STORAGE | {"MEMORY_GB": "60000"}, "memory_gb"),
    ("storage", STORAGE | {"S3_BUCKET": "kv", "S3_CA_FILE": "/nowhere"}, "s3_ca_file"),
    ("sidecar", SIDECAR | {"LM_PORT": TAKEN}, "lm_port"),
    ("sidecar", SIDECAR | {"ARENA_GB": "60000"}, "arena_gb"),
    ("sidecar", SIDECAR | {"ARENA_PATH": "/proc/arena"}, "arena_path"),
    ("sidecar", SIDECAR | {"SOCKET_PATH": "/proc/nowhere/s.sock"}, "socket_path"),
    ("sidecar", SIDECAR | {"SOCKET_PATH": f"{HERE}/log/s.sock"}, "socket_path"),
    ("sidecar", SIDECAR | {"SOCKET_PATH": "/tmp/" + "s" * 120}, "socket_path"),
    ("sidecar", SIDECAR | {"REMOTE_URL": "redis://h:x"}, "remote_url"),
]


def environment(service: str, options: Mapping[str, str], directory: Path) -> dict[str, str]:
    return {
        f"LMCACHE_{service.upper()}_{name}": value.replace(HERE, str(directory))
        for name, value in options.items()
    }


def ended(service: str, arguments: list[str], environ: Mapping[str, str], log: Path) -> int:
    """The exit code of a service that cannot start."""
    inherited = {name: value for name, value in os.environ.items() if "LMCACHE_" not in name}
    command = [f"lmcache_{service}", *arguments]
    with log.open("wb") as output:
        process = ForkedService(command, inherited | environ, output.fileno())
    try:
        return process.wait(60.0)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.mark.parametrize(
    ("service", "options", "option"),
    CASES,
    ids=[f"{service}-{i}-{option}" for i, (service, _, option) in enumerate(CASES)],
)
def test_what_only_the_start_finds_is_one_sentence_that_names_the_option(
    service: str, options: Mapping[str, str], option: str, tmp_path: Path
) -> None:
    (tmp_path / "s").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        environ = environment(service, options, tmp_path)
        environ = {name: value.replace(TAKEN, number) for name, value in environ.items()}
        code = ended(service, [], environ, tmp_path / "log")
    lines = (tmp_path / "log").read_text().splitlines()
    errors = [line for line in lines if " INFO " not in line]
    assert code == 2, lines
    assert len(errors) == 1, lines
    assert errors[0].startswith(f"lmcache-{service}: ")
    assert f"{option}=" in errors[0] or f"{option} " in errors[0]
    assert "uvicorn" not in "".join(lines)
    if TAKEN in options.values():
        assert f"{option}={number}: cannot listen on 127.0.0.1: Address already in use" in errors[0]


def test_a_port_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = "/nowhere/port"
    environ = environment("broker", BROKER, tmp_path)
    assert ended("broker", ["--port-file", path], environ, tmp_path / "log") == 2
    [line] = (tmp_path / "log").read_text().splitlines()
    assert f"--port-file '{path}'" in line


@pytest.mark.parametrize(("option", "path"), [("socket_path", "/tmp/a\\0b"), ("disk_path", "")])
def test_a_path_that_names_nothing_is_refused(tmp_path: Path, option: str, path: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f'{option}: "{path}"\n')
    environ = environment("sidecar", {"PORT": "0", "LM_PORT": "0"}, tmp_path)
    assert ended("sidecar", ["--config", str(config)], environ, tmp_path / "log") == 2
    [line] = (tmp_path / "log").read_text().splitlines()
    assert option in line


def test_every_address_is_logged_and_so_are_the_other_servers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        other = f"127.0.0.1:{silent.getsockname()[1]}"
        options = STORAGE | COMPAT | {"HEALTH_PORT": "0", "REPLICAS_URL": f"lm://{other}"}
        environ = environment("storage", options, tmp_path)
        with running_service("lmcache_storage", tmp_path, environ) as service:
            ports = service.ports
        listening = next(line for line in service.output.splitlines() if "listening:" in line)
        for option in ("port", "lm_port", "lmcache_compat_port", "health_port"):
            name = option.removesuffix("port") + "address"
            assert f"{name}=127.0.0.1:{ports[option]}" in listening.split()
        assert f"servers known: service=lm://{other} servers=- addresses={other}" in service.output
        assert "uvicorn" not in service.output
    options = environment("sidecar", SIDECAR, tmp_path)
    with running_service("lmcache_sidecar", tmp_path, options) as sidecar:
        assert f"listening for engines: socket_path={tmp_path}/s.sock" in sidecar.output


@pytest.mark.parametrize(
    ("service", "options", "where"),
    [
        ("lookup", LOOKUP | {"REDIS_URL": REDIS}, "redis at 127.0.0.1:1"),
        ("sidecar", SIDECAR | {"REMOTE_URL": "lm://127.0.0.1:1"}, "lm://127.0.0.1:1"),
        (
            "storage",
            STORAGE
            | {
                "S3_BUCKET": "kv",
                "S3_ENDPOINT_URL": "http://127.0.0.1:1",
                "S3_ACCESS_KEY_FILE": f"{HERE}/key",
                "S3_SECRET_KEY_FILE": f"{HERE}/key",
            },
            "'kv' at http://127.0.0.1:1",
        ),
    ],
)
async def test_what_cannot_be_reached_at_the_start_is_logged_once_with_its_host(
    service: str, options: Mapping[str, str], where: str, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("hunter2")
    environ = environment(service, options, tmp_path)
    with running_service(f"lmcache_{service}", tmp_path, environ) as running:
        await until(lambda: "dependency unavailable" in running.output)
    [line] = [line for line in running.output.splitlines() if "dependency unavailable" in line]
    assert where in line
    assert "hunter2" not in running.output
