"""What importing costs: no torch in the base, and in a serving process nothing that it does not bring itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH_FREE = (
    *("errors", "config", "keys", "record", "wire", "lookup", "p2p", "security", "telemetry"),
    *("concurrency", "memory", "sidecar", "storage"),
)
NOT_IN_A_SERVING_PROCESS = {"sortedcontainers", "httpx", "redis", "pydantic", "fastapi", "uvicorn", "typer", "rich", "lmcache_kernels"}


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("package", TORCH_FREE)
def test_the_base_imports_no_torch(package: str) -> None:
    assert "torch" not in modules_after(f"import lmcache_core.{package}")


def test_storage_parts_of_a_service_import_no_torch() -> None:
    statement = "import lmcache_core.storage.stack, lmcache_core.storage.disk, lmcache_core.storage.remote.lm, lmcache_core.storage.peer"
    assert "torch" not in modules_after(statement)


def test_an_engine_at_a_sidecar_imports_only_what_a_serving_process_brings() -> None:
    loaded = modules_after("import lmcache_core.engine, lmcache_core.sidecar, lmcache_core.gpu_connectors, lmcache_core.token_database")
    assert loaded >= {"torch", "msgspec"}
    assert loaded & NOT_IN_A_SERVING_PROCESS == set()
