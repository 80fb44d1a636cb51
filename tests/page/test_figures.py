"""What the page shows is what the services count."""

from __future__ import annotations

import time
import urllib.request

import pytest
from selenium.webdriver import Chrome

from tests.fixtures.neighbourhood import eventually, get_json
from tests.page.cluster import (
    NUM_CHUNKS,
    NUM_TOKENS,
    PODS,
    PREFILL_TOKENS_PER_S,
    STORAGE,
    Cluster,
    Page,
)

HOSTILE = "<img src=x onerror=document.title='owned'>"


@pytest.fixture
def page(chrome: Chrome, cluster: Cluster) -> Page:
    cluster.until_reported()
    opened = Page(chrome, cluster.url)
    opened.shown()
    return opened


def test_totals(page: Page, cluster: Cluster) -> None:
    counted = cluster.until_reported()
    page.fresh()
    totals = page.values("[data-total]", "total")
    sums = {name: sum(by_label.values()) for name, by_label in counted.items()}
    assert int(totals["peers"]) == 4
    assert int(totals["requested"]) == sums["requested_chunks_total"] > 0
    assert int(totals["loaded"]) == sums["loaded_chunks_total"] > 0
    assert int(totals["loaded-bytes"]) == sums["loaded_bytes_total"] > 0
    assert int(totals["missed"]) == sums["missed_chunks_total"] > 0
    assert int(totals["stored-bytes"]) == sums["stored_bytes_total"] > 0
    assert float(totals["hit-ratio"]) == sums["loaded_chunks_total"] / (
        sums["loaded_chunks_total"] + sums["missed_chunks_total"]
    )
    missed = {reason: count for reason, count in counted["missed_chunks_total"].items() if count}
    assert {reason: int(count) for reason, count in page.rows("#misses").items()} == missed


def test_pods_tiers_and_links(page: Page, cluster: Cluster) -> None:
    pulled = sum(
        get_json(f"http://127.0.0.1:{one.port}/v1/tiers")["tiers"]["peers"]["pulled_bytes"]
        for one in cluster.sidecars
    )
    nodes = page.run(
        "return [...document.querySelectorAll('#topology [data-peer]')].map((node) =>"
        " node.dataset.peer)"
    )
    assert sorted(nodes) == sorted([*PODS, STORAGE])
    links = page.texts("#topology .link title")
    assert len(links) == len(cluster.overview()["links"]) >= 2
    assert all(" pulled " in link and " from " in link for link in links)
    assert sum(link["num_bytes"] for link in cluster.overview()["links"]) == pulled > 0
    known = cluster.overview()["links"]
    by_name = page.run(
        "return [...document.querySelectorAll('#topology [data-row]')].map((row) =>"
        " row.dataset.row)"
    )
    assert by_name == [f"{link['requester']} {link['server']}" for link in known]
    zones = page.run(
        "return [...document.querySelectorAll('#topology text.tick')].map((text) =>"
        " text.textContent)"
    )
    assert zones == ["zone-a", "zone-b"]
    for sidecar in cluster.sidecars:
        status = sidecar.get("/v1/status")
        used = sidecar.get("/v1/tiers")["tiers"]["memory"]["used_bytes"]
        shown = page.values(f"[data-row='{status['instance']}'] [data-tier]", "tier")
        assert int(shown["memory"]) == used > 0


def test_storage_shows_how_full_it_is(page: Page, cluster: Cluster) -> None:
    shown = page.values(f"[data-row='{STORAGE}'] [data-tier]", "tier")
    (storage,) = [peer for peer in cluster.overview()["peers"] if peer["id"] == STORAGE]
    assert shown == {tier["name"]: str(tier["used_bytes"]) for tier in storage["figures"]["tiers"]}
    assert "of 21.5 MB" in page.texts(f"[data-row='{STORAGE}'] [data-tier]")[0]


def test_time_goes_by(page: Page, cluster: Cluster) -> None:
    def shown() -> dict[str, int]:
        page.fresh()
        return {
            name: int(value)
            for name, value in page.values("#sources [data-source]", "source").items()
        }

    cluster.until_reported()
    time.sleep(1.5)  # the interval in which that was reported is over
    before, counted = shown(), cluster.counted()["loaded_bytes_total"]
    cluster.work(2)
    grown = {
        name: count - counted[name]
        for name, count in cluster.until_reported()["loaded_bytes_total"].items()
    }
    assert all(grown.values())
    eventually(
        lambda: {name: count - before.get(name, 0) for name, count in shown().items()} == grown
    )
    assert page.run("return document.querySelectorAll('#sources rect').length") > len(grown)
    assert page.run("return document.querySelectorAll('#ratio circle').length") >= 1


def test_what_was_gained(page: Page, cluster: Cluster) -> None:
    counted = cluster.until_reported()["saved_tokens_total"]
    assert counted == {"org/model": sum(counted.values())}
    page.fresh()
    before = {name: int(value) for name, value in page.values("[data-gain]", "gain").items()}
    assert next(iter(before)) == "300"
    cluster.work(7)
    grown = cluster.until_reported()["saved_tokens_total"]["org/model"] - counted["org/model"]
    assert grown > 0

    def gains() -> dict[str, int]:
        page.fresh()
        return {name: int(value) for name, value in page.values("[data-gain]", "gain").items()}

    eventually(lambda: gains() == {name: value + grown for name, value in before.items()})
    assert "watched for" in page.texts("#gains dt")[0]
    saved_s = gains()["300"] / PREFILL_TOKENS_PER_S
    minutes, said = page.texts("#gains .sub")[0].split(" ", 1)
    assert said.startswith("min of prefill, hit ratio")
    digits = 0.06 if saved_s < 600 else 0.6  # the page shows one decimal below 10
    assert float(minutes) == pytest.approx(saved_s / 60, abs=digits)
    assert list(page.rows("#gains")) == ["org/model"]
    assert "tenant default" in page.texts("#gains caption")[0]


def test_a_prompt_that_is_pulled_is_shown_once(page: Page, cluster: Cluster) -> None:
    cluster.work(3)
    page.fresh()
    shown = {chunk_id: int(count) for chunk_id, count in page.rows("#hot").items()}
    hot = cluster.overview()["hot_chunks"]
    assert shown == {one["chunk_id"]: one["num_pulls"] for one in hot}
    assert list(shown.values()) == sorted(shown.values(), reverse=True)
    assert {one["num_chunks"] for one in hot} == {NUM_CHUNKS}
    text = page.texts(f"#hot [data-row='{hot[0]['chunk_id']}']")[0]
    assert f"{NUM_TOKENS} tokens" in text
    assert "org/model" in text


def test_what_peers_say_is_text(page: Page, cluster: Cluster) -> None:
    tier = {"name": HOSTILE, "num_chunks": 1, "used_bytes": 1, "capacity_bytes": 2}
    figures = {
        "missed_chunks": {HOSTILE: 7},
        "loaded_bytes": {HOSTILE: 9},
        "loaded_chunks": {HOSTILE: 1},
        "tiers": [tier],
    }
    cluster.beat(
        "stranger",
        figures | {"pulled_bytes": {HOSTILE: 5, PODS[0]: 6}},
        drain=None,
        draining=True,
    )
    page.fresh()
    assert any(HOSTILE.replace("_", " ") in text for text in page.texts("#misses th"))
    assert any(HOSTILE in text for text in page.texts("#peers td"))
    assert any(HOSTILE in text for text in page.texts("#topology td"))
    assert (
        page.run("return document.querySelectorAll('#overview img, #overview script').length") == 0
    )
    assert page.chrome.title == "lmcache: cluster"
    assert page.complaints() == []
    eventually(lambda: "stranger" not in {peer["id"] for peer in cluster.overview()["peers"]})


def test_a_drain_is_followed(page: Page, cluster: Cluster) -> None:
    request = urllib.request.Request(f"{cluster.url}/v1/admin/peers/{PODS[2]}:drain", method="POST")
    with urllib.request.urlopen(request, timeout=5) as response:
        assert response.status == 200
    eventually(lambda: (cluster.overview()["peers"][0]["drain"] or {}).get("state") == "done")
    page.fresh()
    drain = cluster.sidecar(PODS[2]).get("/v1/status")["drain"]
    (shown,) = page.texts(f"#drains [data-drain='{PODS[2]}']")
    settled = drain["total"] - drain["left"]
    assert (
        f"done: {settled} of {drain['total']} chunks settled, {drain['handed_over']} handed over"
        in shown
    )
    bar = page.run(
        "const bar = document.querySelector('#drains progress'); return [bar.value, bar.max]"
    )
    assert bar == [settled or 1, max(1, drain["total"])]
