"""One cluster for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fixtures.ctl import FakeVllm, SmallCluster, fake_vllm, small_cluster
from tests.fixtures.ctl import no_cluster as no_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    with small_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    with fake_vllm() as running:
        yield running
