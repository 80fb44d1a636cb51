"""Packages that import their names on first use: they have every name that they list, and without
a name no torch.
"""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PACKAGES = ("blend", "gpu_connectors", "memory", "serde", "serde.cachegen")
TORCH_FREE = ("blend", "memory", "serde", "serde.codec", "serde.cachegen")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_every_name_that_it_lists_and_no_other(package: str) -> None:
    module = importlib.import_module(f"lmcache_core.{package}")
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = module.NoSuchName


def test_importing_the_packages_imports_no_torch() -> None:
    packages = ", ".join(f"lmcache_core.{name}" for name in TORCH_FREE)
    program = f"import {packages}, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"torch", "safetensors", "numba", "numpy"} & set(done.stdout.split())
