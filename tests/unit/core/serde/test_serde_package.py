"""What importing the package costs, and what it exports."""

from __future__ import annotations

import subprocess
import sys

import lmcache_core.serde
import pytest


def test_the_package_and_its_torch_free_parts_import_no_torch() -> None:
    code = (
        "import lmcache_core.serde, lmcache_core.serde.codec, sys; print('torch' in sys.modules,"
        " 'safetensors' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("name", lmcache_core.serde.__all__)
def test_every_name_is_resolved(name: str) -> None:
    assert getattr(lmcache_core.serde, name) is not None


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="PickleSerializer"):
        _ = lmcache_core.serde.PickleSerializer
