"""A port of lm:// that is taken: one sentence that names the option, and the exit code of a
taken REST port.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [
    ("lmcache_storage", "LMCACHE_STORAGE_", "LM_PORT"),
    ("lmcache_storage", "LMCACHE_STORAGE_", "LMCACHE_COMPAT_PORT"),
    ("lmcache_storage", "LMCACHE_STORAGE_", "PORT"),
    ("lmcache_sidecar", "LMCACHE_SIDECAR_", "LM_PORT"),
]


@pytest.mark.parametrize(("package", "prefix", "option"), CASES)
def test_a_taken_port_is_told_in_one_sentence(
    tmp_path: Path, package: str, prefix: str, option: str
) -> None:
    options = {"PORT": "0", "LM_PORT": "0"}
    if package == "lmcache_sidecar":
        options |= {
            "SOCKET_PATH": str(tmp_path / "s.sock"),
            "ARENA_PATH": str(tmp_path / "arena"),
            "ARENA_GB": "0.01",
        }
        options |= {"LOOKUP_URL": "http://127.0.0.1:9", "BROKER_URL": "http://127.0.0.1:9"}
    else:
        options |= {
            "MEMORY_GB": "0.01",
            "LMCACHE_COMPAT_PORT": "0",
            "LMCACHE_COMPAT_TENANT": "foreign",
        }
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        environ = {
            **os.environ,
            **{prefix + name: value for name, value in (options | {option: str(number)}).items()},
        }
        ended = subprocess.run(
            [sys.executable, "-m", package],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1, ended.stderr
    told = [
        line for line in ended.stderr.splitlines() if "WARNING" not in line and "INFO" not in line
    ]
    assert len(told) == 1, ended.stderr
    assert "in use" in told[0]
    assert str(number) in told[0]
    assert option == "PORT" or option.lower() in told[0]
