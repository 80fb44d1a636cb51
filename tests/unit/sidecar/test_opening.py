"""The start of a sidecar."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from lmcache_core.errors import CapacityError, ConfigError
from lmcache_core.memory import populate, shared
from lmcache_core.memory.shared import ArenaFile
from lmcache_core.storage.remote.file import FileBackend
from lmcache_core.wire.client import ClientOptions, LmClient
from lmcache_servicekit.state import ServiceState, service_state
from lmcache_sidecar import sidecar as opening
from lmcache_sidecar.app import create_app
from lmcache_sidecar.arena import owner
from lmcache_sidecar.arena.owner import ArenaOwner, open_arena

from tests.fixtures.sidecar_app import make_settings, serving
from tests.fixtures.waiting import threads_end
from tests.suites.chunks import held_keys, make_chunk, make_key

PATIENT = ClientOptions(timeout_s=60.0, connect_timeout_s=60.0)


def probes(state: ServiceState) -> httpx.AsyncClient:
    url = f"http://127.0.0.1:{state.ports['health_port']}"
    return httpx.AsyncClient(base_url=url, timeout=60)


class Volume:
    """A volume that has room from the third attempt on."""

    def __init__(self) -> None:
        self.attempts = 0

    def open(self, file: ArenaFile, recovers: bool) -> ArenaOwner:
        self.attempts += 1
        if self.attempts < 3:
            raise CapacityError("no room")
        return open_arena(file, recovers)


async def test_probes_answer_while_it_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = Volume()
    app = create_app(make_settings(tmp_path, arena_wait_s=30, health_port=0))
    state = service_state(app)
    seen: list[list[int]] = []

    async def look(seconds: float) -> None:
        async with probes(state) as client:
            answers = [await client.get(path) for path in ("/healthz", "/readyz")]
            seen.append([answer.status_code for answer in answers])

    monkeypatch.setattr(opening, "open_arena", volume.open)
    monkeypatch.setattr(opening, "wait_before_retry", look)
    async with app.router.lifespan_context(app):
        assert volume.attempts == 3
        async with probes(state) as client:
            assert (await client.get("/readyz")).status_code == 200
    assert seen == [[200, 503], [200, 503]]


@pytest.mark.parametrize("is_new", [True, False])
async def test_probes_answer_while_the_arena_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """Both populating a new arena and reading the journal of an earlier start take the longer the
    larger the arena is.
    """
    if not is_new:
        async with opening.lifespan(create_app(make_settings(tmp_path))):
            """Leave an arena."""
    module, name = (populate, "_populate") if is_new else (owner, "replay")
    slow = getattr(module, name)
    has_begun, may_end = threading.Event(), threading.Event()

    def work(*args: Any) -> Any:
        has_begun.set()
        assert may_end.wait(60)
        return slow(*args)

    monkeypatch.setattr(module, name, work)
    app = create_app(make_settings(tmp_path, health_port=0))
    state = service_state(app)
    async with AsyncExitStack() as exits:
        exits.callback(may_end.set)
        start = asyncio.create_task(exits.enter_async_context(app.router.lifespan_context(app)))
        assert await asyncio.to_thread(has_begun.wait, 60)
        async with probes(state) as client:
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/readyz")).status_code == 503
            assert not start.done()
            may_end.set()
            await start
            assert (await client.get("/readyz")).status_code == 200


async def test_wait_for_room_is_bounded_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    volume = Volume()
    volume.attempts = -100
    monkeypatch.setattr(opening, "open_arena", volume.open)
    clock = mock.Mock(monotonic=mock.Mock(return_value=0.0))

    async def sleep(seconds: float) -> None:
        clock.monotonic.return_value += seconds

    monkeypatch.setattr(opening, "time", clock)
    monkeypatch.setattr(opening, "wait_before_retry", sleep)
    app = create_app(make_settings(tmp_path, arena_wait_s=3.5))
    with pytest.raises(ConfigError, match=r"arena_gb=.*no room"):
        async with AsyncExitStack() as exits:
            await exits.enter_async_context(opening.lifespan(app))
    assert clock.monotonic.return_value == 3.5
    assert volume.attempts == -100 + 5, "at once, three times, and at the end"
    assert caplog.text.count("no room") == 1


async def test_tier_that_cannot_open_closes_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(tier: FileBackend) -> None:
        raise ConfigError("refused")

    (tmp_path / "shared").mkdir()
    disk = {"disk_path": tmp_path / "disk", "disk_gb": 0.01}
    with monkeypatch.context() as patch:
        patch.setattr(FileBackend, "open", refuse)
        with pytest.raises(ConfigError, match="refused"):
            async with opening.lifespan(
                create_app(make_settings(tmp_path, **disk, remote_url=f"file://{tmp_path}/shared"))
            ):
                pass
    threads_end("lmcache-disk")
    async with opening.lifespan(create_app(make_settings(tmp_path, **disk))):
        """The directory is free again."""


async def test_the_limits_of_its_settings_reach_its_tiers(tmp_path: Path) -> None:
    options = {
        "disk_path": tmp_path / "disk",
        "disk_gb": 0.01,
        "eviction_policy": "lru",
        "tenant": "mine",
    }
    quotas = {
        "tenant_quota_gb": 2048 / 2**30,
        "tenant_disk_quota_gb": 3 * 4096 / 2**30,
        "chunk_ttl_s": 3600,
    }
    app = create_app(make_settings(tmp_path, **options, **quotas))
    async with opening.lifespan(app):
        hot, disk = app.state.sidecar.local_tiers
        for name in range(5):
            assert await hot.batched_put([make_chunk(name, tenant="mine")]) == [True]
            assert await disk.batched_put([make_chunk(name, tenant="mine")]) == [True]
        assert held_keys(hot) == [make_key(name, "mine") for name in (3, 4)]
        assert set(held_keys(disk)) == {make_key(name, "mine") for name in (2, 3, 4)}


@pytest.mark.parametrize("options", [{}, {"accept_handover": True}])
async def test_peers_store_chunks_only_if_that_is_configured(
    tmp_path: Path, options: dict[str, object]
) -> None:
    app = create_app(make_settings(tmp_path, **options))
    async with opening.lifespan(app):
        client = LmClient("127.0.0.1", service_state(app).ports["lm_port"], None, PATIENT)
        assert await client.put([make_chunk("theirs")]) == [bool(options)]
        await client.close()
        assert held_keys(app.state.sidecar.tiers.hot) == [make_key("theirs")] * bool(options)


async def test_the_arena_is_as_its_settings_say(tmp_path: Path) -> None:
    app = create_app(
        make_settings(tmp_path, arena_mode="600", arena_huge_pages="advise", arena_recover=False)
    )
    async with opening.lifespan(app):
        arena = app.state.sidecar.arena
        assert arena.path.stat().st_mode & 0o777 == 0o600
        assert arena.path.stat().st_blocks * 512 >= arena.size
        assert not app.state.sidecar.arena_owner.is_recorded
    assert list((tmp_path / "arena").iterdir()) == []


@pytest.mark.parametrize(
    ("option", "policy", "is_advised"),
    [
        ("auto", "advise", True),
        ("auto", "deny", False),
        ("off", "always", False),
        ("advise", "never", True),
    ],
)
async def test_advice_for_huge_pages_is_logged_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    option: str,
    policy: str,
    is_advised: bool,
) -> None:
    for module in (shared, opening):
        monkeypatch.setattr(module, "huge_page_policy", lambda directory: policy)
    caplog.set_level("INFO")
    async with serving(tmp_path, arena_huge_pages=option) as (client, _):
        found = f"huge_pages={'advised' if is_advised else 'off'} volume_policy={policy}"
        assert caplog.text.count(found) == caplog.text.count("huge_pages=") == 1
        assert (await client.get("/v1/status")).json()["arena"]["huge_pages"] == is_advised
        detail = (await client.get("/readyz")).json()["checks"]["arena"]["detail"]
        assert ("huge pages advised" in detail) == is_advised


async def test_a_socket_that_cannot_be_set_up_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chmod = Path.chmod

    def fail(path: Path, mode: int) -> None:
        if path.name == "s.sock":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", fail)
    with pytest.raises(ConfigError, match="choose another path"):
        async with opening.lifespan(create_app(make_settings(tmp_path))):
            pass
    refused = (ConnectionRefusedError, FileNotFoundError)  # asyncio removes it since Python 3.13
    with pytest.raises(refused), socket.socket(socket.AF_UNIX) as engine:
        engine.connect(str(tmp_path / "s.sock"))
