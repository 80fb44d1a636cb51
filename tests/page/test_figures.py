"""What the page shows is what the services count."""

from __future__ import annotations

import time
import urllib.request

import pytest
from selenium.webdriver import Chrome

from tests.fixtures.neighbourhood import eventually, get_json
from tests.page.cluster import NUM_CHUNKS, Cluster, Page

HOSTILE = "<img src=x onerror=document.title='owned'>"


@pytest.fixture
def page(chrome: Chrome, cluster: Cluster) -> Page:
    cluster.until_told()
    opened = Page(chrome, cluster.url)
    opened.shown()
    return opened


def test_totals(page: Page, cluster: Cluster) -> None:
    counted = cluster.until_told()
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
        get_json(f"http://127.0.0.1:{one.port}/v1/tiers")["tiers"]["P2PBackend"]["pulled_bytes"]
        for one in cluster.sidecars
    )
    nodes = page.run(
        "return [...document.querySelectorAll('#topology [data-peer]')].map((node) =>"
        " node.dataset.peer)"
    )
    assert sorted(nodes) == ["storage-0", "vllm-7d9f-a", "vllm-7d9f-b", "vllm-7d9f-c"]
    links = page.texts("#topology .link title")
    assert len(links) == len(cluster.overview()["links"]) >= 2
    assert all(" pulled " in link and " from " in link for link in links)
    assert sum(link["num_bytes"] for link in cluster.overview()["links"]) == pulled > 0
    told = cluster.overview()["links"]
    by_name = page.run(
        "return [...document.querySelectorAll('#topology [data-row]')].map((row) =>"
        " row.dataset.row)"
    )
    assert by_name == [f"{link['requester']} {link['server']}" for link in told]
    zones = page.run(
        "return [...document.querySelectorAll('#topology text.tick')].map((text) =>"
        " text.textContent)"
    )
    assert zones == ["zone-a", "zone-b"]
    for sidecar in cluster.sidecars:
        status = sidecar.get("/v1/status")
        used = sidecar.get("/v1/tiers")["tiers"]["Hot"]["used_bytes"]
        shown = page.values(f"[data-row='{status['instance']}'] [data-tier]", "tier")
        assert int(shown["Hot"]) == used > 0


def test_storage_tells_how_full_it_is(page: Page, cluster: Cluster) -> None:
    shown = page.values("[data-row='storage-0'] [data-tier]", "tier")
    (storage,) = [peer for peer in cluster.overview()["peers"] if peer["id"] == "storage-0"]
    assert shown == {tier["name"]: str(tier["used_bytes"]) for tier in storage["figures"]["tiers"]}
    assert "of 21.5 MB" in page.texts("[data-row='storage-0'] [data-tier]")[0]


def test_time_goes_by(page: Page, cluster: Cluster) -> None:
    def shown() -> dict[str, int]:
        page.fresh()
        return {
            name: int(value)
            for name, value in page.values("#sources [data-source]", "source").items()
        }

    cluster.until_told()
    time.sleep(1.5)  # the interval in which that was told is over
    before, counted = shown(), cluster.counted()["loaded_bytes_total"]
    cluster.work(2)
    grown = {
        name: count - counted[name]
        for name, count in cluster.until_told()["loaded_bytes_total"].items()
    }
    assert all(grown.values())
    eventually(
        lambda: {name: count - before.get(name, 0) for name, count in shown().items()} == grown
    )
    assert page.run("return document.querySelectorAll('#sources rect').length") > len(grown)
    assert page.run("return document.querySelectorAll('#ratio circle').length") >= 1


def test_prefixes_that_are_pulled_most(page: Page, cluster: Cluster) -> None:
    cluster.work(3)
    page.fresh()
    shown = {chunk_id: int(count) for chunk_id, count in page.rows("#hot").items()}
    assert shown == {one["chunk_id"]: one["num_pulls"] for one in cluster.overview()["hot_chunks"]}
    assert len(shown) >= NUM_CHUNKS
    assert list(shown.values()) == sorted(shown.values(), reverse=True)


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
        figures | {"pulled_bytes": {HOSTILE: 5, "vllm-7d9f-a": 6}},
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
    assert page.chrome.title == "LMCache"
    assert page.complaints() == []
    eventually(lambda: "stranger" not in {peer["id"] for peer in cluster.overview()["peers"]})


def test_a_drain_is_followed(page: Page, cluster: Cluster) -> None:
    request = urllib.request.Request(f"{cluster.url}/v1/peers/vllm-7d9f-c:drain", method="POST")
    with urllib.request.urlopen(request, timeout=5) as response:
        assert response.status == 200
    eventually(lambda: (cluster.overview()["peers"][0]["drain"] or {}).get("state") == "done")
    page.fresh()
    drain = cluster.sidecar("vllm-7d9f-c").get("/v1/status")["drain"]
    (shown,) = page.texts("#drains [data-drain='vllm-7d9f-c']")
    settled = drain["total"] - drain["left"]
    assert (
        f"done: {settled} of {drain['total']} chunks settled, {drain['handed_over']} handed over"
        in shown
    )
    bar = page.run(
        "const bar = document.querySelector('#drains progress'); return [bar.value, bar.max]"
    )
    assert bar == [settled or 1, max(1, drain["total"])]
