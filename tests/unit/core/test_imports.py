"""What importing costs: no torch in the base, and in a serving process nothing that it does not
bring itself. Names that are imported on first use are all there.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import lmcache_core
import pytest

from tests.fixtures.sidecar import running_socket

ROOT = Path(__file__).resolve().parents[3]

SMALL = ("blend", "memory", "serde", "serde.codec", "serde.cachegen")
"""They import none of numpy, numba and safetensors either."""
TORCH_FREE = (
    *("errors", "config", "keys", "record", "wire", "lookup", "p2p", "security", "telemetry"),
    *("concurrency", "sidecar", "storage", "blend.certificate"),
    *("storage.stack", "storage.disk", "storage.remote.lm", "storage.peer"),
)
IMPORT_THE_BASE = """
import sys
for name in sys.argv[1].split():
    __import__(f"lmcache_core.{name}")
assert not {"torch", "numpy", "numba", "safetensors"} & set(sys.modules)
for name in sys.argv[2].split():
    __import__(f"lmcache_core.{name}")
assert "torch" not in sys.modules
"""


def output_of(code: str, *arguments: str) -> set[str]:
    """The words that a fresh interpreter prints."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return set(done.stdout.split())


def test_base_imports_no_torch() -> None:
    assert output_of(IMPORT_THE_BASE, " ".join(SMALL), " ".join(TORCH_FREE)) == set()


def test_package_imports_little() -> None:
    heavy = {"torch", "numpy", "transformers", "msgspec", "yaml", "httpx", "asyncio"}
    assert not heavy & output_of("import lmcache_core, sys; print(*sys.modules)")


def test_package_has_the_names_that_it_lists_and_keeps_the_builtin_open() -> None:
    source = (ROOT / "libs/lmcache_core/src/lmcache_core/__init__.py").read_text(encoding="utf-8")
    seen_by_type_checkers = {
        alias.name: str(node.module)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.col_offset
        for alias in node.names
    }
    assert set(seen_by_type_checkers) == {*lmcache_core.__all__, "open"} <= {*dir(lmcache_core)}
    for name, module in seen_by_type_checkers.items():
        assert getattr(lmcache_core, name) is getattr(importlib.import_module(module), name)
    imported: dict[str, object] = {}
    exec("from lmcache_core import *", imported)
    assert "open" not in imported
    assert not hasattr(lmcache_core, "nothing")


@pytest.mark.parametrize(
    "package", ["blend", "gpu_connectors", "memory", "serde", "serde.cachegen"]
)
def test_a_package_has_every_name_that_it_lists_and_no_other(package: str) -> None:
    module = importlib.import_module(f"lmcache_core.{package}")
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = module.NoSuchName


RUN_IN_VLLM = """
import sys
import torch, numpy, msgspec, xxhash, prometheus_client

brought = set(sys.modules)
import lmcache_core.engine, lmcache_core.sidecar, lmcache_core.gpu_connectors
import lmcache_core.token_database

assert "lmcache_kernels" not in sys.modules
root, directory, socket = sys.argv[1:]
sys.path.append(root)
from pathlib import Path
from tests.fixtures.vllm_engine import running
from tests.fixtures.vllm_engine.worlds import with_sidecar, make_model, prompt
from tests.fixtures.fake_vllm import imported_connector

with imported_connector() as module:
    loaded = set(sys.modules)
    with running(module, make_model(Path(directory)), with_sidecar(socket)) as engine:
        for _ in range(2):
            hit = engine.ask(prompt(1, 43))
            engine.forget()
        assert engine.tally(hit).num_external == 40, "the connector was not at work"
        loaded |= set(sys.modules)
print(*{name.partition(".")[0] for name in loaded - brought})
"""


def test_engine_and_connector_at_a_sidecar_import_only_what_vllm_brings(tmp_path: Path) -> None:
    """Loads and stores included: what is imported late counts as well."""
    with running_socket(tmp_path) as sidecar:
        loaded = output_of(RUN_IN_VLLM, str(ROOT), str(tmp_path), str(sidecar.path))
    brought = {"torch", "numpy", "msgspec", "xxhash", "prometheus_client"}
    ours = {"lmcache_core", "lmcache_kernels", "vllm", "tests"}
    assert loaded >= {"lmcache_core", "vllm"}
    assert loaded - set(sys.stdlib_module_names) - brought - ours == set()
