"""A configuration in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lmcache_core.config import LMCacheEngineConfig

FromYaml = Callable[[str], LMCacheEngineConfig]


@pytest.fixture
def from_yaml(tmp_path: Path) -> FromYaml:
    """Reads a configuration from a YAML file with the text."""

    def read(text: str) -> LMCacheEngineConfig:
        path = tmp_path / "lmcache.yaml"
        path.write_text(text, encoding="utf-8")
        return LMCacheEngineConfig.from_file(str(path))

    return read
