"""What importing costs: no torch in the base, and in a serving process nothing that it does not
bring itself.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import lmcache_core

from tests.fixtures.sidecar import running_socket

ROOT = Path(__file__).resolve().parents[3]

TORCH_FREE = (
    *("errors", "config", "keys", "record", "wire", "lookup", "p2p", "security", "telemetry"),
    *("concurrency", "memory", "sidecar", "storage", "blend", "blend.certificate"),
    *("storage.stack", "storage.disk", "storage.remote.lm", "storage.peer"),
)
NOT_IN_A_SERVING_PROCESS = {
    "sortedcontainers",
    "httpx",
    "redis",
    "pydantic",
    "fastapi",
    "uvicorn",
    "typer",
    "rich",
    "lmcache_kernels",
}


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after the statement."""
    return words_of(
        f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in"
        " sys.modules}))"
    )


def words_of(code: str) -> set[str]:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_base_imports_no_torch() -> None:
    packages = ", ".join(f"lmcache_core.{name}" for name in TORCH_FREE)
    assert "torch" not in modules_after(f"import {packages}")


def test_package_imports_little_and_has_the_names_that_it_lists() -> None:
    heavy = {"torch", "numpy", "transformers", "msgspec", "yaml", "httpx", "asyncio"}
    assert not heavy & modules_after("import lmcache_core")
    program = (
        "import lmcache_core as c\nprint(*[n for n in c.__all__ if n not in dir(c)"
        " or getattr(c, n).__name__ != n])\nassert c.open is not open\nc.__version__\n"
        "from lmcache_core import *\nassert c.open is not open\nassert 'open' in dir(c)\n"
        "assert not hasattr(c, 'nothing')"
    )
    assert words_of(program) == set()


def test_type_checkers_see_the_names_where_they_are() -> None:
    source = (ROOT / "libs/lmcache_core/src/lmcache_core/__init__.py").read_text(encoding="utf-8")
    seen = {
        alias.name: str(node.module)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.col_offset
        for alias in node.names
    }
    assert set(seen) == {*lmcache_core.__all__, "open"}
    for name, module in seen.items():
        assert getattr(lmcache_core, name) is getattr(importlib.import_module(module), name)


RUN_IN_VLLM = """
import sys
from pathlib import Path

sys.path.append({root!r})
bare = set(sys.modules)
from tests.fixtures.vllm_engine import running
from tests.fixtures.vllm_engine.worlds import with_sidecar, make_model, prompt
from tests.fixtures.fake_vllm import imported_connector

with imported_connector() as module:
    loaded = set(sys.modules)
    with running(module, make_model(Path({directory!r})), with_sidecar({socket!r})) as engine:
        for _ in range(2):
            hit = engine.ask(prompt(1, 43))
            engine.forget()
        assert engine.tally(hit).num_external == 40, "the connector was not at work"
        loaded |= set(sys.modules)
print(*sorted({{name.partition(".")[0] for name in loaded - bare}}))
"""
IN_A_VLLM_PROCESS = {
    "torch",
    "numpy",
    "msgspec",
    "xxhash",
    "lmcache_core",
    "lmcache_kernels",
    "vllm",
    "prometheus_client",
    "tests",
}
WHAT_THESE_BRING = "import torch, numpy, msgspec, xxhash, prometheus_client"


def test_connector_at_a_sidecar_imports_only_what_vllm_brings(tmp_path: Path) -> None:
    """Loads and stores included: what is imported late counts as well."""
    with running_socket(tmp_path) as sidecar:
        loaded = words_of(
            RUN_IN_VLLM.format(root=str(ROOT), directory=str(tmp_path), socket=str(sidecar.path))
        )
    assert loaded >= {"torch", "msgspec", "lmcache_core", "vllm"}
    ours = loaded - set(sys.stdlib_module_names) - IN_A_VLLM_PROCESS
    assert ours - modules_after(WHAT_THESE_BRING) == set()


def test_engine_at_a_sidecar_imports_only_what_a_serving_process_brings() -> None:
    loaded = modules_after(
        "import lmcache_core.engine, lmcache_core.sidecar, lmcache_core.gpu_connectors,"
        " lmcache_core.token_database"
    )
    assert loaded >= {"torch", "msgspec"}
    assert loaded & NOT_IN_A_SERVING_PROCESS == set()
