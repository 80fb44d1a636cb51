"""Lookup and broker, for each test of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_demo.settings import quiet_environment

from tests.fixtures.neighbourhood import Neighbourhood
from tests.fixtures.processes import Processes


@pytest.fixture
def neighbourhood(tmp_path: Path) -> Iterator[Neighbourhood]:
    with Processes(tmp_path, quiet_environment()) as processes:
        yield Neighbourhood(processes, tmp_path)
