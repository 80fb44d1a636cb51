"""The guarded services, started once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fixtures.guarded_services import Guarded, guarded_services


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_services(tmp_path_factory.mktemp("guarded")) as running:
        yield running
