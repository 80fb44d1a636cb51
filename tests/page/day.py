"""A day of a cluster that serves an 8B model, told to a real broker within seconds: its heartbeats
and pulls, minute by minute, under a clock that this holds.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import lmcache_broker.overview as overview_service
import uvicorn
from lmcache_broker.app import create_app
from lmcache_broker.overview import History
from lmcache_broker.routes import BrokerParts
from lmcache_broker.settings import BrokerSettings
from lmcache_core.p2p import ModelFigures, Peer, PeerFigures, TierFigures
from lmcache_core.p2p.messages import ChunkHolders
from lmcache_core.security import Principal

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
CHUNK_TOKENS = 256
CHUNK_BYTES = CHUNK_TOKENS * 32 * 8 * 128 * 2 * 2
"""32 layers, 8 heads of 128, keys and values, 2 bytes each."""
PREFILL_TOKENS_PER_S = 9_000
MINUTE_S = 60
ENDS_MS = 1_772_730_000_000
"""17:00 on a Thursday, UTC."""
NEW_PROMPT_H = 14.2
"""When the application gets another system prompt: all but the oldest conversations miss."""
GB = 10**9
CLIENT = Principal("default", "client", "pod")
STORAGE = Principal("default", "storage", "storage")
HOT = ((38, 24), (21, 12), (13, 31), (8, 9), (5, 47))
"""Pulls in the last minute, and chunks, of the prompts that are pulled most."""


def busy(hour: float) -> float:
    """Return requests per second at each pod: few at night, fewer at noon than around it."""
    return (
        0.12
        + 0.9 * math.exp(-(((hour - 10.6) / 2.1) ** 2))
        + math.exp(-(((hour - 15.4) / 2.4) ** 2))
    )


def repeated(hour: float) -> float:
    """Return the share of prompts' chunks that are stored: little of what runs at night, less at
    noon than around it.
    """
    share = (
        0.38 + 0.36 / (1 + math.exp(8.2 - hour)) - 0.09 * math.exp(-(((hour - 12.6) / 0.5) ** 2))
    )
    since_h = hour - NEW_PROMPT_H
    return share - (0.4 * math.exp(-since_h / 0.3) if since_h >= 0 else 0.0)


@dataclass
class Pod:
    """Counts as a sidecar does."""

    peer: Peer
    requested: int = 0
    stored: int = 0
    loaded: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    pulled: Counter[str] = field(default_factory=Counter)

    def work(self, hour: float, chance: random.Random, others: list[str]) -> None:
        """Count the requests of a minute: ten chunks each."""
        requests = busy(hour) * MINUTE_S * chance.uniform(0.8, 1.2)
        asked = round(10 * requests)
        found = round(asked * min(0.95, repeated(hour) * chance.uniform(0.93, 1.07)))
        self.requested += asked
        for tier, share in (("disk", 0.17), ("peers", 0.15), ("storage", 0.05)):
            num_chunks = round(found * share * chance.uniform(0.7, 1.3))
            self.loaded[tier] += num_chunks
            self.loaded["memory"] -= num_chunks
            if tier == "peers":
                self.pulled[chance.choice(others)] += num_chunks
        self.loaded["memory"] += found
        missed = asked - found
        evicted = round(0.14 * missed * chance.uniform(0.5, 1.5))
        late = round(0.02 * missed * chance.random())
        self.missed.update(never_stored=missed - evicted - late, evicted=evicted, deadline=late)
        self.stored += missed

    def figures(self, share_of_day: float) -> PeerFigures:
        saved_tokens = CHUNK_TOKENS * self.loaded.total()
        disk = round(180 * GB + 230 * GB * share_of_day)
        return PeerFigures(
            requested_chunks=self.requested,
            loaded_chunks=dict(self.loaded),
            loaded_bytes={tier: CHUNK_BYTES * count for tier, count in self.loaded.items()},
            missed_chunks=dict(self.missed),
            stored_chunks=self.stored,
            stored_bytes=CHUNK_BYTES * self.stored,
            pulled_bytes={peer: CHUNK_BYTES * count for peer, count in self.pulled.items()},
            tiers=(tier("memory", 62 * GB, 64 * GB), tier("disk", disk, 600 * GB)),
            sole_bytes=disk // 5,
            models={
                MODEL: ModelFigures(
                    saved_tokens, saved_tokens * 1000 // PREFILL_TOKENS_PER_S, CHUNK_TOKENS
                )
            },
        )


def tier(name: str, used_bytes: int, capacity_bytes: int) -> TierFigures:
    return TierFigures(name, used_bytes // CHUNK_BYTES, used_bytes, capacity_bytes)


def peers() -> tuple[list[Pod], list[Peer]]:
    """Return six pods and two storage servers in three zones, as the chart and a cloud name
    them.
    """

    def peer(name: str, i: int, kind: str) -> Peer:
        return Peer(
            f"cache-lmcache-{name}",
            1,
            f"lm://10.0.{i}.17:65433",
            "storage" if kind == "storage" else "sidecar",
            f"eu-west-1{'abc'[i % 3]}",
            f"ip-10-0-{i}-17.eu-west-1.compute.internal",
        )

    ends = ("4kt2p", "8w9xb", "c6m4w", "hq7zd", "n2v5s", "t9r8f")
    pods = [Pod(peer(f"vllm-llama-7c9d8b6f5d-{end}", i, "pod")) for i, end in enumerate(ends)]
    return pods, [peer(f"storage-{i}", 6 + i, "storage") for i in range(2)]


class Clock:
    """Unix time in milliseconds."""

    def __init__(self) -> None:
        self.now_ms = ENDS_MS - 86_400_000

    def __call__(self) -> int:
        return self.now_ms


async def live(parts: BrokerParts, clock: Clock) -> None:
    """Tell the broker of the day, then of the pulls of its last minute."""
    chance = random.Random(8)
    pods, servers = peers()
    held = PeerFigures(
        tiers=(tier("memory", 118 * GB, 128 * GB), tier("disk", 903 * GB, 2000 * GB))
    )
    others = {
        pod.peer.id: [one.peer.id for one in pods if one is not pod] + [servers[0].id]
        for pod in pods
    }
    for minute in range(86_400 // MINUTE_S):
        hour = (clock.now_ms / 3_600_000) % 24
        for pod in pods:
            await parts.registry.announce(
                CLIENT,
                pod.peer,
                load=0.15 + 0.3 * busy(hour) * chance.uniform(0.8, 1.2),
                ttl_ms=3_600_000,
                draining=False,
                figures=pod.figures(minute / (86_400 / MINUTE_S)),
            )
            pod.work(hour, chance, others[pod.peer.id])
        for server in servers:
            await parts.registry.announce(
                STORAGE, server, load=0.08, ttl_ms=3_600_000, draining=False, figures=held
            )
        await parts.overview.sample()
        clock.now_ms += 1000 * MINUTE_S
    ids = [pod.peer.id for pod in pods]
    for prompt, (num_pulls, num_chunks) in enumerate(HOT):
        for pull in range(num_pulls):
            asks, *holders = (ids[(prompt + pull + step) % len(ids)] for step in range(4))
            names = [hashlib.md5(f"{prompt} {i}".encode()).hexdigest() for i in range(num_chunks)]
            wanted = {name: ChunkHolders(name, list(holders)) for name in names}
            plan = await parts.scheduler.ask(CLIENT, asks, wanted, 0)
            if pull:  # the first lasts
                await parts.scheduler.end(CLIENT, asks, [one.pull for one in plan.assignments])


@contextmanager
def broker_after_a_day() -> Iterator[str]:
    """Serve a broker that has watched the day; gives its address."""
    clock = Clock()
    app = create_app(
        BrokerSettings(
            instance_id="cache-lmcache-broker-6d5f9c7b44-m2xkq",
            page_title="cache in namespace ml",
            history_interval_s=MINUTE_S,
            hot_chunk_pulls=1000,
            max_lease_ttl_ms=3_600_000,
            ticket_ttl_ms=600_000,
        )
    )
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
    listener = socket.create_server(("127.0.0.1", 0))

    async def serve() -> None:
        async with app.router.lifespan_context(app):
            await live(app.state.broker, clock)
            await server.serve(sockets=[listener])

    with (
        listener,
        patch.object(overview_service, "unix_ms", clock),
        patch.object(overview_service, "History", lambda: History(clock)),
    ):
        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
