"""An engine that is open during a fork: the child works without it, the parent keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.forked_children import PATIENCE_S, WarmParent, warm_parent
from tests.integration.test_closing import storage_server

pytestmark = pytest.mark.timeout(2 * PATIENCE_S)


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmParent]:
    directory = tmp_path_factory.mktemp("parents")
    with warm_parent("tests.fixtures.forking_parent", directory) as warm:
        yield warm


@pytest.mark.parametrize("end", ["os._exit", "sys.exit", "multiprocessing", "unused"])
def test_a_forked_child_misses_at_once_and_harms_nothing(
    end: str, parents: WarmParent, tmp_path: Path
) -> None:
    with storage_server() as (_, url):
        parents.run(end, str(tmp_path), url)


def test_a_forked_child_needs_no_slower_tier(parents: WarmParent) -> None:
    parents.run("sys.exit", "-", "-")
