"""`GET /v1/overview`: figures from heartbeats, now and over time."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import lmcache_broker.overview as overview_service
import msgspec
import pytest
from fastapi import FastAPI
from lmcache_broker import app as broker_app
from lmcache_broker.app import create_app
from lmcache_broker.overview import (
    MAX_LABELS,
    MAX_SAMPLED_OWNERS,
    MAX_SAMPLES,
    MAX_SHOWN_CHUNKS,
    MAX_SHOWN_LINKS,
    MAX_SHOWN_PEERS,
    OTHER_LABEL,
    History,
    Overview,
    Work,
    grow,
)
from lmcache_broker.peers.record import PeerRecord
from lmcache_broker.settings import BrokerSettings
from lmcache_core.errors import ConfigError
from lmcache_core.p2p import ModelFigures, Peer, PeerFigures

from tests.fixtures.broker import TOKENS, bearer, write_tokens

BODY = {"incarnation": 1, "distributed_url": "lm://10.0.0.1:65433"}
FIGURES: dict[str, Any] = {
    "requested_chunks": 12,
    "loaded_chunks": {"memory": 7, "peers": 2},
    "loaded_bytes": {"memory": 7000, "peers": 2000},
    "missed_chunks": {"never_stored": 3},
    "stored_chunks": 5,
    "stored_bytes": 5000,
    "pulled_bytes": {"b": 2000},
    "tiers": [{"name": "memory", "num_chunks": 5, "used_bytes": 5000, "capacity_bytes": 9000}],
    "sole_bytes": 4000,
    "models": {"llama": {"saved_tokens": 2304, "saved_ms": 1500, "chunk_tokens": 64.0}},
}


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[FastAPI]:
    app = create_app(
        BrokerSettings(
            auth_tokens_file=write_tokens(tmp_path / "tokens.yaml"),
            hot_chunk_pulls=1000,
            instance_id="broker-0",
        )
    )
    async with app.router.lifespan_context(app):
        yield app


class Caller:
    def __init__(self, app: FastAPI, name: str) -> None:
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://broker")
        self._headers = bearer(name)

    async def beat(
        self, peer: str, figures: Mapping[str, Any] | None = None, **more: Any
    ) -> httpx.Response:
        body = BODY | ({} if figures is None else {"figures": figures}) | more
        return await self._http.put(f"/v1/peers/{peer}", json=body, headers=self._headers)

    async def overview(self, **query: Any) -> dict[str, Any]:
        answer = await self._http.get("/v1/overview", params=query, headers=self._headers)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    async def pull(self, requester: str, chunks: list[str], holder: str) -> None:
        body = {
            "requester": requester,
            "chunks": [{"chunk_id": chunk, "holders": [holder]} for chunk in chunks],
        }
        assert (await self._http.post("/v1/transfers", json=body, headers=self._headers)).json()[
            "assignments"
        ]


async def test_heartbeats_are_shown(app: FastAPI) -> None:
    acme = Caller(app, "acme")
    await acme.beat("a", FIGURES)
    await acme.beat("b", {"requested_chunks": 1, "missed_chunks": {"never_stored": 1}})
    await acme.beat("old")
    drain = {
        "state": "handing_over",
        "total": 4,
        "handed_over": 1,
        "already_elsewhere": 1,
        "failed": 0,
        "left": 2,
    }
    await acme.beat("z", draining=True, drain=drain)
    seen = await acme.overview()
    assert [peer["id"] for peer in seen["peers"]] == ["z", "a", "b", "old"], (
        "those that drain first"
    )
    by_id = {peer["id"]: peer for peer in seen["peers"]}
    assert by_id["a"]["figures"] == {
        name: value for name, value in FIGURES.items() if name != "pulled_bytes"
    }
    assert by_id["old"]["figures"] is None, "a peer of an earlier release sends none"
    assert by_id["z"]["drain"] == drain
    assert seen["links"] == [{"requester": "a", "server": "b", "num_bytes": 2000}]
    assert seen["totals"] == {
        "requested_chunks": 13,
        "loaded_chunks": {"memory": 7, "peers": 2},
        "loaded_bytes": {"memory": 7000, "peers": 2000},
        "missed_chunks": {"never_stored": 4},
        "stored_bytes": 5000,
        "saved_tokens": {"llama": 2304},
        "saved_ms": {"llama": 1500},
    }
    assert (seen["num_peers"], seen["interval_s"]) == (4, 10.0)
    assert (seen["broker"], seen["shares"], seen["is_shared"]) == ("broker-0", False, False)
    assert seen["tenant"] == "acme"
    assert msgspec.json.decode(msgspec.json.encode(msgspec.convert(seen, Overview))) == seen, (
        "what it is documented to be"
    )


async def test_a_tenant_sees_its_own_peers_and_the_shared_ones(app: FastAPI) -> None:
    acme, rival, operator = (Caller(app, name) for name in TOKENS)
    await acme.beat("a", FIGURES)
    await rival.beat("r", FIGURES | {"requested_chunks": 1000})
    await operator.beat("shared", FIGURES | {"requested_chunks": 1})
    await acme.pull("me", ["0" * 32], "a")
    seen = await acme.overview()
    assert sorted(peer["id"] for peer in seen["peers"]) == ["a", "shared"]
    assert seen["totals"]["requested_chunks"] == 13
    assert [one["chunk_id"] for one in seen["hot_chunks"]] == ["0" * 32]
    assert (await rival.overview())["hot_chunks"] == []


async def test_the_chunks_of_a_prompt_count_once(app: FastAPI) -> None:
    """Two prompts share a system prompt of three chunks; one of them is longer."""
    acme = Caller(app, "acme")
    await acme.beat("a")
    await acme.beat("me", FIGURES)
    chunks = [f"{i:032x}" for i in range(9)]
    await acme.pull("me", chunks, "a")
    await acme.pull("me", [*chunks[:3], "f" * 32], "a")
    await acme.pull("stranger", chunks[:3], "a")
    shown = [
        {name: one[name] for name in ("chunk_id", "num_pulls", "num_chunks", "num_holders")}
        for one in (await acme.overview())["hot_chunks"]
    ]
    assert shown == [
        {"chunk_id": chunks[2], "num_pulls": 3, "num_chunks": 3, "num_holders": 2},
        {"chunk_id": chunks[8], "num_pulls": 1, "num_chunks": 9, "num_holders": 2},
    ]
    system, whole = (await acme.overview())["hot_chunks"]
    assert (whole["num_tokens"], whole["model"]) == (9 * 64, "llama")
    assert (system["num_tokens"], system["model"]) == (None, None)


async def test_samples_show_the_work_between_them(app: FastAPI) -> None:
    acme, overview = Caller(app, "acme"), app.state.broker.overview
    await acme.beat("a", FIGURES)
    await overview.sample()
    await acme.beat(
        "a", FIGURES | {"requested_chunks": 15, "loaded_bytes": {"memory": 7000, "peers": 2500}}
    )
    await overview.sample()
    first, second = (await acme.overview(max_samples=2))["samples"]
    assert first["work"]["requested_chunks"] == 0, (
        "what was counted before the first sample belongs to no interval"
    )
    assert (second["work"]["requested_chunks"], second["work"]["loaded_bytes"]) == (
        3,
        {"peers": 500},
    )
    assert first["ended_ms"] <= second["ended_ms"]
    assert (await acme.overview(max_samples=0))["samples"] == []


async def test_a_start_that_fails_leaves_no_sampler_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise ConfigError("no cluster")

    monkeypatch.setattr(broker_app, "create_discovery", fail)
    app = create_app(BrokerSettings())
    with pytest.raises(ConfigError, match="no cluster"):
        async with app.router.lifespan_context(app):
            pass
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("broker/")] == []


async def test_an_admin_alone_sees_what_each_tenant_saved(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_service, "MIN_KEPT_COST_S", 0.0)  # every view is kept
    callers = {name: Caller(app, name) for name in TOKENS}
    for num_tokens in (0, 100):
        for name, share in (("acme", 1), ("rival", 2)):
            saved_by = {"llama": {"saved_tokens": share * num_tokens, "saved_ms": num_tokens}}
            await callers[name].beat(f"pod-{name}", {"models": saved_by})
        await app.state.broker.overview.sample()
    assert (await callers["operator"].overview())["tenants"] == [
        {"tenant": "rival", "saved_tokens": [200, 200, 200], "saved_ms": 100},
        {"tenant": "acme", "saved_tokens": [100, 100, 100], "saved_ms": 100},
    ]
    for name in ("acme", "rival"):
        assert (await callers[name].overview())["tenants"] == []


async def test_overview_is_bounded(app: FastAPI) -> None:
    operator = Caller(app, "operator")
    pulled = {f"peer-{i}": i + 1 for i in range(64)}
    for i in range(MAX_SHOWN_PEERS + 2):
        assert (await operator.beat(f"p{i:03d}", {"pulled_bytes": pulled})).status_code == 200
    for i in range(MAX_SHOWN_CHUNKS + 5):
        await operator.pull("me", [f"{i:032x}"], "p000")
    seen = await operator.overview()
    assert len(seen["hot_chunks"]) == MAX_SHOWN_CHUNKS
    assert (len(seen["peers"]), seen["num_peers"]) == (MAX_SHOWN_PEERS, MAX_SHOWN_PEERS + 2)
    assert len(seen["links"]) == MAX_SHOWN_LINKS
    assert seen["links"][0]["num_bytes"] == 64


async def test_views_are_kept_for_a_while_by_tenant(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme, rival = Caller(app, "acme"), Caller(app, "rival")
    await acme.beat("a", FIGURES)
    monkeypatch.setattr(overview_service, "MIN_KEPT_COST_S", 0.0)
    monkeypatch.setattr(overview_service, "REST_PER_COST", 1_000_000)
    monkeypatch.setattr(overview_service, "MAX_REST_S", 3600.0)
    first = await acme.overview()
    await acme.beat("b")
    assert await acme.overview() == first
    assert (await acme.overview(max_samples=0))["time_ms"] == first["time_ms"]
    assert (await rival.overview())["peers"] == []
    monkeypatch.setattr(overview_service, "MAX_KEPT_VIEWS", 1)
    monkeypatch.setattr(overview_service, "MAX_REST_S", 0.0)
    await Caller(app, "operator").overview()
    assert len((await acme.overview())["peers"]) == 2
    await acme.beat("c")
    assert len((await acme.overview())["peers"]) == 3, "none is kept longer than this"


@pytest.mark.parametrize(
    "figures",
    [
        {"loaded_chunks": {"x" * 254: 1}},
        {"pulled_bytes": {f"p{i}": 1 for i in range(65)}},
        {"tiers": [{"name": "t", "num_chunks": 0, "used_bytes": 0, "capacity_bytes": 0}] * 17},
    ],
)
async def test_figures_without_bounds_are_refused(app: FastAPI, figures: dict[str, Any]) -> None:
    assert (await Caller(app, "acme").beat("a", figures)).status_code == 422


def record(
    name: str, figures: PeerFigures | None, incarnation: int = 1, owner: str = "acme"
) -> PeerRecord:
    return PeerRecord(Peer(name, incarnation, "lm://h:1"), owner, 0.0, False, 1.0, figures=figures)


@pytest.mark.parametrize(
    ("counters", "counted"),
    [
        ([(1, 10), (2, 4)], [0, 4]),  # the next process begins with nothing
        ([(1, 10), (1, 3)], [0, 0]),
        ([(1, 1000), (2, 1005)], [0, 5]),  # an undrain: a new incarnation of the same process
        ([(1, 10), (1, None)], [0, 0]),
    ],
)
def test_only_the_growth_of_counters_is_counted(
    counters: list[tuple[int, int | None]], counted: list[int]
) -> None:
    history = History(lambda: 7)
    for incarnation, count in counters:
        figures = None if count is None else PeerFigures(requested_chunks=count)
        history.sample([record("a", figures, incarnation=incarnation)])
    assert [sample.work.requested_chunks for sample in history.of(["acme"])] == counted


def saved(num_tokens: int) -> PeerFigures:
    return PeerFigures(models={"llama": ModelFigures(num_tokens, num_tokens // 2)})


def test_savings_of_the_last_minutes_hour_and_day() -> None:
    now_ms = 0
    history = History(lambda: now_ms)
    assert [window.watched_s for window in history.windows(["acme"])] == [0, 0, 0]
    for minute in range(0, 26 * 60 + 1, 2):
        now_ms = minute * 60_000
        history.sample([record("a", saved(100 * minute))])
    windows = history.windows(["acme", "unknown"])
    assert [window.window_s for window in windows] == [300, 3600, 86_400]
    minutes = [window.work.saved_tokens["llama"] / 100 for window in windows]
    assert minutes == [window.watched_s / 60 for window in windows], "all of the time it claims"
    for covered, least, most in zip(minutes, (5, 60, 1440), (7, 66, 1502), strict=True):
        assert least <= covered <= most
    assert [window.work.saved_ms["llama"] for window in windows] == [50 * one for one in minutes]


def test_history_is_bounded() -> None:
    history = History(lambda: 7)
    for i in range(MAX_SAMPLES + 3):
        history.sample([record("a", PeerFigures(requested_chunks=i))])
    assert len(history.of(["acme"])) == MAX_SAMPLES
    [_, _, day] = history.windows(["acme"])
    assert day.work.requested_chunks == MAX_SAMPLES + 2
    owners = [f"t{i}" for i in range(MAX_SAMPLED_OWNERS + 9)]
    for count in (0, 1):
        history.sample(
            [record("a", PeerFigures(requested_chunks=count), owner=owner) for owner in owners]
        )
    (last,) = history.of(owners, 1)
    assert last.work.requested_chunks == MAX_SAMPLED_OWNERS


def test_history_of_many_names_reaches_back_less_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overview_service, "MAX_CELLS", 1000)
    now_ms = 0
    history = History(lambda: now_ms)
    for second in range(0, 20_000, 100):
        now_ms = 1000 * second
        missed = {f"reason-{i}": 1 + second for i in range(32)}
        peers = [record("a", PeerFigures(missed_chunks=missed), owner=f"t{i}") for i in range(9)]
        history.sample([*peers, record("idle", PeerFigures(), owner="idle")])
    assert len(history.of(["t0"])) == 1000 // (9 * (32 + 5)) == 3
    for window in history.windows(["t0"]):
        assert 0 < window.watched_s <= min(window.window_s, 14_400)
        assert window.work.missed_chunks == {f"reason-{i}": window.watched_s for i in range(32)}, (
            "nothing but the oldest is gone"
        )


def test_labels_are_bounded() -> None:
    work = Work()
    for peer in range(4):
        grow(work, PeerFigures(missed_chunks={f"{peer}-{i}": 2 for i in range(32)}))
    assert len(work.missed_chunks) == MAX_LABELS + 1
    assert work.missed_chunks["0-0"] == 2
    assert work.missed_chunks[OTHER_LABEL] == 2 * (4 * 32 - MAX_LABELS)
