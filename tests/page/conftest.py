"""One browser, and one small cluster with traffic, for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_demo.processes import Processes
from lmcache_demo.settings import quiet_environment
from selenium.webdriver import Chrome

from tests.fixtures.browser import browser
from tests.page.cluster import Cluster


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pictures", type=Path, default=None, help="write the pictures of the documentation there"
    )


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with Processes(directory, quiet_environment()) as processes:
        yield Cluster(processes, directory)
