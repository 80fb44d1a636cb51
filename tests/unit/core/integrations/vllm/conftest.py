"""A model, and the connector's modules that need a vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.fixtures.fake_vllm import imported_connector
from tests.fixtures.vllm_engine.worlds import make_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder."""
    return make_model(tmp_path)


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """The connector's module with vLLM 0.32."""
    with imported_connector() as imported:
        yield imported
