"""Real services with traffic, and the page as a browser shows it."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcache_demo.processes import Processes
from selenium.webdriver import Chrome

from tests.fixtures.kv import CHUNK_SIZE, empty_kv, random_kv, tokens_of
from tests.fixtures.neighbourhood import Neighbourhood, Sidecar, eventually, get_json
from tests.fixtures.sidecar import engine_at

PODS = tuple(f"cache-lmcache-vllm-llama-7c9d8b6f5d-{end}" for end in ("a4k2p", "b7w9x", "q9m4w"))
STORAGE = "cache-lmcache-storage-0"
"""Named as the chart of a release `cache` names them."""
NUM_CHUNKS = 4
NUM_TOKENS = NUM_CHUNKS * CHUNK_SIZE
PREFILL_TOKENS_PER_S = 2.0
"""So slow that loading always pays; the pictures have figures of their own (`day.py`)."""
SAMPLE = re.compile(
    r'^(?P<name>lmcache_sidecar_\w+)(?:\{\w+="(?P<label>[^"]*)"\})? (?P<value>\S+)$', re.MULTILINE
)


class Cluster:
    """Lookup, broker, storage and three sidecars in two zones, whose engines have stored, loaded
    and missed.
    """

    def __init__(self, processes: Processes, directory: Path) -> None:
        self.house = Neighbourhood(
            processes,
            directory,
            instance_id="lmcache-broker-0",
            default_lease_ttl_ms=900,
            history_interval_s=1,
            hot_chunk_pulls=1000,
        )
        neighbours = {"lookup_url": self.house.lookup_url, "broker_url": self.house.broker_url}
        settings = {
            "port": 0,
            "lm_port": 0,
            "memory_gb": 0.02,
            "instance_id": STORAGE,
            "zone": "zone-b",
            "node": "node-3",
        }
        processes.start_service(STORAGE, "lmcache_storage", settings | neighbours)
        places = {
            PODS[0]: ("zone-a", "node-1"),
            PODS[1]: ("zone-a", "node-2"),
            PODS[2]: ("zone-b", "node-3"),
        }
        self.sidecars = [
            self.house.sidecar(name, zone=zone, node=node) for name, (zone, node) in places.items()
        ]
        self.work(1)

    @property
    def url(self) -> str:
        return self.house.broker_url

    def work(self, seed: int) -> None:
        """One of the first two stores a prompt, which all others load from peers and then from
        their own memory. Another prompt is nowhere.
        """
        first = self.sidecars[seed % 2]
        others = [sidecar for sidecar in self.sidecars if sidecar is not first]
        tokens = tokens_of(NUM_TOKENS, seed)
        with engine_at(first.socket, prefill_tokens_per_s=PREFILL_TOKENS_PER_S) as engine:
            engine.store(tokens, kvcaches=random_kv(NUM_TOKENS, seed))
            assert engine.retrieve(tokens, kvcaches=empty_kv(NUM_TOKENS)).all()
        for sidecar in others:
            with engine_at(sidecar.socket, prefill_tokens_per_s=PREFILL_TOKENS_PER_S) as engine:
                eventually(lambda: engine.lookup(tokens, ["P2PBackend"]) == NUM_TOKENS)
                assert engine.retrieve(tokens, kvcaches=empty_kv(NUM_TOKENS)).all()
                assert engine.retrieve(tokens, kvcaches=empty_kv(NUM_TOKENS)).all()
                assert not engine.retrieve(
                    tokens_of(NUM_TOKENS, -seed), kvcaches=empty_kv(NUM_TOKENS)
                ).any()

    def counted(self) -> dict[str, Counter[str]]:
        """The sidecars' own counters, all together, by name and label."""
        found: dict[str, Counter[str]] = {}
        for sidecar in self.sidecars:
            for match in SAMPLE.finditer(sidecar.text("/metrics")):
                name = match["name"].removeprefix("lmcache_sidecar_")
                found.setdefault(name, Counter())[match["label"] or ""] += int(
                    float(match["value"])
                )
        return found

    def overview(self) -> dict[str, Any]:
        return get_json(f"{self.url}/v1/overview")

    def until_reported(self) -> dict[str, Counter[str]]:
        """Wait until the broker has all that was counted from heartbeats; return it."""
        counted = self.counted()
        requested = sum(counted["requested_chunks_total"].values())
        eventually(lambda: self.overview()["totals"]["requested_chunks"] == requested)
        return counted

    def beat(self, name: str, figures: Mapping[str, Any], **more: Any) -> None:
        """A peer that this test plays itself, for less than a second."""
        beat(self.url, name, figures, ttl_ms=900, **more)

    def sidecar(self, name: str) -> Sidecar:
        return next(sidecar for sidecar in self.sidecars if name in sidecar.socket.name)


def beat(
    url: str, name: str, figures: Mapping[str, Any] | None, token: str | None = None, **more: Any
) -> None:
    """Play a peer: one heartbeat of it."""
    body = {
        "incarnation": 1,
        "distributed_url": "lm://10.0.0.1:65433",
        "ttl_ms": 60_000,
        "figures": figures,
    } | more
    request = urllib.request.Request(
        f"{url}/v1/peers/{name}", json.dumps(body).encode(), method="PUT"
    )
    request.add_header("content-type", "application/json")
    if token is not None:
        request.add_header("authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=5) as response:
        assert response.status == 200


class Page:
    """The page in a browser."""

    def __init__(self, chrome: Chrome, url: str) -> None:
        self.chrome = chrome
        chrome.get_log("browser")
        chrome.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.chrome.execute_script(script, *arguments)

    def texts(self, selector: str) -> list[str]:
        return list(
            self.run(
                "return [...document.querySelectorAll(arguments[0])].map((node) =>"
                " node.textContent)",
                selector,
            )
        )

    def values(self, selector: str, key: str) -> dict[str, str]:
        """Of each such element its `data-<key>`, and its `data-value`."""
        script = (
            "return Object.fromEntries([...document.querySelectorAll(arguments[0])].map((n) =>"
            " [n.dataset[arguments[1]], n.dataset.value]))"
        )
        return dict(self.run(script, selector, key))

    def rows(self, place: str) -> dict[str, str]:
        """Of each row of a table its name, and its second cell."""
        script = (
            "return [...document.querySelectorAll(`${arguments[0]} [data-row]`)].map((row) =>"
            " [row.dataset.row, row.cells[1].textContent])"
        )
        return dict(self.run(script, place))

    def fresh(self) -> None:
        """Wait for what the broker knows now: for the answer to a question that is asked from
        here on.
        """
        self.chrome.refresh()
        self.shown()

    def next_turn(self) -> None:
        """Have the page ask now, as it does when its tab is seen again, and wait until it has
        drawn the answer.
        """
        turn = self.run("return document.body.dataset.turn")
        self.poke()
        eventually(lambda: self.run("return document.body.dataset.turn") != turn)

    def poke(self) -> None:
        self.run("document.dispatchEvent(new Event('visibilitychange'))")

    def shown(self) -> None:
        deadline = time.monotonic() + 15
        while not self.run(
            "return !document.getElementById('overview').hidden && document.body.dataset.turn !=="
            " undefined"
        ):
            assert time.monotonic() < deadline, self.run("return document.body.innerText")
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """What the browser says of the page's scripts and of its policy."""
        return [
            entry["message"]
            for entry in self.chrome.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    def resize(self, width: int, height: int) -> None:
        """No scrollbars: they would take room of a phone's width, and show in pictures."""
        self.chrome.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def colours(self, scheme: str) -> None:
        self.chrome.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
