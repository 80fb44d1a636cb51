"""A connector next to a stand-in for vLLM, and a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from lmcache_demo.settings import quiet_environment

from tests.fixtures.fake_vllm import NEW, OLD, imported_connector
from tests.fixtures.neighbourhood import Sidecar, start_sidecar
from tests.fixtures.processes import Processes
from tests.fixtures.sidecar import unhurried_clients
from tests.fixtures.vllm_engine.worlds import make_model

ROOT = Path(__file__).resolve().parents[3]


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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """One for all tests that leave it alive; each has a model of its own there."""
    directory = tmp_path_factory.mktemp("shared")
    with (
        Processes(directory, quiet_environment(PYTHONPATH=str(ROOT))) as owner,
        unhurried_clients(),
    ):
        yield start_sidecar(owner, directory)


@pytest.fixture
def own_model(model: Path, request: pytest.FixtureRequest) -> Path:
    """A model whose KV no other test has stored."""
    (model / "model.safetensors").write_text(request.node.nodeid)
    return model
