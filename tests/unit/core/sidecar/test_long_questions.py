"""A question that takes several requests waits no longer than one that takes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from lmcache_core.keys import CacheEngineKey
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.sidecar import store as store_module
from lmcache_core.wire import messages as m

from tests.fixtures.held_clock import HeldClock
from tests.fixtures.scripted_sidecar import Answer, scripted_sidecar, store_at
from tests.suites.chunks import make_chunk, make_key

ANSWER_S = 25.0
PAYLOAD = bytes(1000)


def num_got(store: SidecarChunkStore, keys: list[CacheEngineKey]) -> int:
    chunks = store.get(keys)
    for chunk in chunks:
        store.release([chunk])
    return len(chunks)


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        (lambda store, keys: store.lookup(keys, None), m.Lookup),
        (lambda store, keys: sum(store.contains(keys)), m.Lookup),
        (num_got, m.LoadExtents),
    ],
    ids=["lookup", "contains", "get"],
)
def test_requests_of_one_call_share_its_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[SidecarChunkStore, list[CacheEngineKey]], int],
    kind: type[m.Message],
) -> None:
    clock = HeldClock()
    num_loaded = 0

    def script(request: m.Message) -> Answer:
        nonlocal num_loaded
        if isinstance(request, m.Hello):
            return None
        if isinstance(request, kind):
            clock.now_s += ANSWER_S
        if isinstance(request, m.Lookup):
            return m.ContainsOk([True])
        if isinstance(request, m.LoadExtents):
            head = make_chunk(num_loaded, payload=PAYLOAD).head
            num_loaded += 1
            extent = m.Extent(num_loaded, 1024 * num_loaded, len(PAYLOAD), "Hot", head)
            return m.Extents((extent,))
        return m.Ok()

    with scripted_sidecar(tmp_path, script) as sidecar, store_at(sidecar.path) as store:
        monkeypatch.setattr(m, "MAX_NAMES", 1)
        monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=clock))
        keys = [make_key(i).key for i in range(6)]
        assert ask(store, keys) == 3, "the fourth request would be late"
    asked = [request.deadline_ms for request in sidecar.requests if isinstance(request, kind)]  # type: ignore[attr-defined]
    assert asked == [60_000, 35_000, 10_000]
