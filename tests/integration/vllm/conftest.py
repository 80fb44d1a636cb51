"""A connector next to a stand-in for vLLM, and a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.fixtures.fake_vllm import NEW, OLD, imported_connector
from tests.fixtures.vllm_engine.worlds import make_model


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """The connector's module for vLLM 0.32."""
    with imported_connector(NEW) as imported:
        yield imported


@pytest.fixture(params=[NEW, OLD])
def any_module(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The connector's module for vLLM 0.32 and for 0.27."""
    with imported_connector(request.param) as imported:
        yield imported


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder."""
    return make_model(tmp_path)
