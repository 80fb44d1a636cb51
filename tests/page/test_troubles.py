"""What the page shows when there is little to show, far too much, or something is wrong."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from tests.fixtures.neighbourhood import eventually, get_json
from tests.fixtures.redis_server import RedisServer
from tests.fixtures.service_process import ServiceProcess, running_service
from tests.page.cluster import Page, beat

CUT_OFF = (Path(__file__).parent / "cut_off.js").read_text()
NUM_PODS = 200
MAX_DRAWN = 32
TIMEOUT_S = 10
NAMES_OF_OBJECTS = ("__proto__", "constructor", "toString")
REVERSED = "\u202egnp.exe"
SLOW_AND_COUNTED = """
const [real, set] = [fetch, setTimeout];
window.calls = window.timers = 0;
window.setTimeout = (...all) => { window.timers++; return set(...all); };
window.fetch = async (...all) => { window.calls++; await new Promise((done) => set(done, 1000)); return real(...all); };
"""  # noqa: E501
HIDDEN = (
    "Object.defineProperty(document, 'visibilityState', {value: arguments[0], configurable: true})"
)
SETTINGS = {
    "LMCACHE_BROKER_PORT": "0",
    "LMCACHE_BROKER_HISTORY_INTERVAL_S": "1",
    "LMCACHE_BROKER_INSTANCE_ID": "broker-0",
    "LMCACHE_BROKER_PAGE_TITLE": "cache in namespace ml",
    "LMCACHE_BROKER_DOCS_URL": "https://handbook.example.com/cache",
}
SEEN_PANELS = """
return [...document.querySelectorAll('section')].filter((one) => one.checkVisibility()).map((one) => one.querySelector('h2').textContent)
"""  # noqa: E501
DOCS = (
    "return [...document.querySelectorAll('a.docs')].map((one) => [one.checkVisibility(),"
    " one.href])"
)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service("lmcache_broker", tmp_path_factory.mktemp("broker"), SETTINGS) as process:
        yield process


@pytest.fixture
def page(chrome: Chrome, broker: ServiceProcess) -> Iterator[Page]:
    """It knows no peer at first."""
    opened = Page(chrome, broker.url)
    opened.resize(1100, 900)
    opened.shown()
    yield opened
    for peer in get_json(f"{broker.url}/v1/peers")["peers"]:
        with urllib.request.urlopen(
            urllib.request.Request(f"{broker.url}/v1/peers/{peer['id']}", method="DELETE"),
            timeout=5,
        ):
            pass


@contextmanager
def stopped(process: ServiceProcess) -> Iterator[None]:
    """It neither answers nor refuses: connections wait."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def state(page: Page) -> str:
    return page.texts("#state")[0]


def test_an_empty_cluster_says_what_to_do(page: Page) -> None:
    assert page.run(SEEN_PANELS) == ["No pod yet"]
    (said,) = page.texts("#empty")
    assert 'lmcache.io/inject: "true"' in said
    assert "lmcachectl doctor -n NAMESPACE" in said
    assert page.run(DOCS) == [[True, "https://handbook.example.com/cache"]] * 2
    assert "NaN" not in page.run("return document.body.textContent")
    assert "reported by broker-0" in page.texts("#as-of")[0]
    assert page.complaints() == []


def test_the_header_says_which_installation_it_is(page: Page, broker: ServiceProcess) -> None:
    version = get_json(f"{broker.url}/openapi.json")["info"]["version"]
    assert page.texts("#release") == [f"cache in namespace ml, version {version}"]


def test_a_window_that_reaches_no_further_back_is_left_out(
    page: Page, broker: ServiceProcess
) -> None:
    """This broker is younger than the smallest."""
    beat(broker.url, "vllm-0", None)
    page.next_turn()
    assert list(page.values("[data-gain]", "gain")) == ["300"]


def test_long_names_of_pods_and_nodes_leave_room_for_the_figures(
    page: Page, broker: ServiceProcess
) -> None:
    """As a cloud names nodes, and a chart with a long release name its pods."""
    domain = ".eu-west-1.compute.internal"
    for i in range(12):
        beat(
            broker.url,
            f"inference-platform-production-{'llama' if i % 2 else 'qwen'}-3-instruct-awq-"
            f"deployment-with-a-long-name-7c9d8b6f5d-{i:05}",
            {"tiers": [{"name": "memory", "num_chunks": 9, "used_bytes": 1, "capacity_bytes": 2}]},
            zone="eu-west-1a",
            node=f"ip-10-0-0-{i}{domain}",
        )
    page.resize(1440, 900)
    page.next_turn()
    assert page.run(CUT_OFF) == []
    assert (
        page.run(
            "return Math.max(...[...document.querySelectorAll('#peers tbody tr')].map((row) =>"
            " row.clientHeight))"
        )
        < 70
    ), "a row has two lines or three"
    assert page.texts("#peers .where")[0] == "eu-west-1aip-10-0-0-1"
    assert page.run("return document.querySelector('.where .faint div').title").endswith(domain)
    (caption,) = page.texts("#peers caption")
    assert caption == (
        f"12 alive; all names begin with inference-platform-production-; all nodes end in {domain}"
    )


@pytest.mark.parametrize(("num_pods", "is_wide"), [(11, False), (12, True)])
def test_the_drawing_of_many_pods_has_the_whole_width(
    num_pods: int, is_wide: bool, page: Page, broker: ServiceProcess
) -> None:
    for i in range(num_pods):
        beat(broker.url, f"vllm-{i}", None)
    page.next_turn()
    widths = page.run(
        "return ['topology-section', 'columns'].map((id) =>"
        " document.getElementById(id).clientWidth)"
    )
    assert (widths[0] > 0.9 * widths[1]) is is_wide
    drawn = page.run("return document.querySelector('#topology svg').clientWidth")
    assert drawn > 0.9 * widths[0]


def test_two_hundred_pods(page: Page, broker: ServiceProcess) -> None:
    """Those are drawn that drain and that move the most; all are in the table, and a small
    screen holds them.
    """
    for i in range(NUM_PODS):
        tier = {
            "name": "memory",
            "num_chunks": i,
            "used_bytes": i,
            "capacity_bytes": NUM_PODS,
        }
        pulled = (
            {f"vllm-{(i * 7 + step) % NUM_PODS}": 1000 * i + step for step in (1, 2)}
            if i >= NUM_PODS - 10
            else {}
        )
        figures = {
            "requested_chunks": 5,
            "loaded_chunks": {"memory": 4},
            "missed_chunks": {"evicted": 1},
            "pulled_bytes": pulled,
        }
        beat(
            broker.url,
            f"vllm-{i}",
            figures | {"tiers": [tier]},
            zone=f"zone-{i % 3}",
            node=f"node-{i % 25}",
            draining=i == 3,
        )
    page.next_turn()
    assert page.values("[data-total]", "total")["peers"] == str(NUM_PODS)
    assert page.run("return document.querySelectorAll('#peers [data-row]').length") == NUM_PODS
    drawn = set(
        page.run(
            "return [...document.querySelectorAll('#topology [data-peer]')].map((node) =>"
            " node.dataset.peer)"
        )
    )
    assert len(drawn) == MAX_DRAWN
    assert drawn >= {"vllm-3"} | {f"vllm-{i}" for i in range(NUM_PODS - 10, NUM_PODS)}
    assert f"{NUM_PODS - MAX_DRAWN} are left out" in page.texts("#topology figcaption")[0]
    took_ms = page.run(
        "const began = performance.now(); dispatchEvent(new Event('resize')); return"
        " performance.now() - began"
    )
    assert took_ms < 1000
    page.resize(360, 740)
    eventually(lambda: page.run("return document.querySelector('#topology svg').clientWidth") < 360)
    assert page.run("return document.documentElement.scrollWidth") <= 360
    assert page.run("return document.querySelector('#peers .scroll').clientHeight") < 740
    assert page.complaints() == []


def test_names_of_members_of_objects_and_names_that_reverse_text(
    page: Page, broker: ServiceProcess
) -> None:
    names = (*NAMES_OF_OBJECTS, REVERSED, "x" * 253)
    for count in (1, 3):
        counts = dict.fromkeys(names, count * 1000)
        beat(
            broker.url,
            "stranger",
            {
                "loaded_bytes": counts,
                "loaded_chunks": counts,
                "missed_chunks": counts,
                "pulled_bytes": counts,
                "models": {name: {"saved_tokens": tokens} for name, tokens in counts.items()},
            },
        )
        num_samples = len(get_json(f"{broker.url}/v1/overview")["samples"])
        eventually(
            lambda known=num_samples: len(get_json(f"{broker.url}/v1/overview")["samples"]) > known,
            TIMEOUT_S,
        )  # type: ignore[misc]
    page.next_turn()
    shown = page.run(
        "return [...document.querySelectorAll('#sources [data-source]')].map((one) =>"
        " [one.dataset.source, one.dataset.value])"
    )
    assert sorted(shown) == sorted([name, "2000"] for name in names)
    assert sorted(page.rows("#misses")) == sorted(names)
    assert page.rows("#gains") == dict.fromkeys(names, "2,000")
    text = page.run("return document.body.innerText")
    assert not [word for word in ("NaN", "[object", "native code", "undefined") if word in text]
    page.resize(360, 740)
    eventually(lambda: page.run("return document.querySelector('#sources svg').clientWidth") < 360)
    assert page.run("return document.documentElement.scrollWidth") <= 360
    assert page.complaints() == []


def test_a_broker_that_hangs_is_named_and_what_was_shown_stays(
    page: Page, broker: ServiceProcess
) -> None:
    beat(broker.url, "vllm-0", None)
    page.next_turn()
    with stopped(broker):
        page.poke()
        eventually(lambda: "cannot be reached; the figures are from" in state(page), TIMEOUT_S)
        assert page.values("[data-total]", "total")["peers"] == "1"
    page.next_turn()
    assert state(page) == ""


def test_an_answer_that_is_none_does_not_end_it(page: Page) -> None:
    page.run(
        "window.real = fetch; window.fetch = () => Promise.resolve(new Response('<h1>Sign"
        " in</h1>'))"
    )
    page.poke()
    eventually(lambda: "is not a broker" in state(page))
    page.run("window.fetch = () => Promise.resolve(new Response('{}', {status: 429}))")
    page.poke()
    eventually(lambda: "The broker answered 429" in state(page))
    page.run("window.fetch = window.real")
    eventually(lambda: state(page) == "", TIMEOUT_S)


def test_a_hidden_tab_asks_nothing(page: Page) -> None:
    """Also where it is hidden while an answer is awaited."""
    page.run(SLOW_AND_COUNTED)
    turn = page.run("return document.body.dataset.turn")
    page.run(f"{HIDDEN}; document.dispatchEvent(new Event('visibilitychange'))", "visible")
    page.run(HIDDEN, "hidden")
    page.poke()
    assert page.run("return document.body.dataset.turn") == turn
    eventually(lambda: page.run("return document.body.dataset.turn") != turn)
    assert page.run("return [window.calls, window.timers]") == [1, 0]
    page.run(HIDDEN, "visible")
    page.next_turn()
    assert page.run("return [window.calls, window.timers]") == [2, 1]


def test_a_tab_that_was_hidden_before_the_first_answer_asks_again(page: Page) -> None:
    source = "window.real = fetch; window.fetch = () => Promise.reject(new TypeError('away'))"
    script = page.chrome.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": source}
    )
    try:
        page.chrome.refresh()
        eventually(lambda: state(page) == "The broker cannot be reached")
        page.run(HIDDEN, "hidden")
        page.poke()
        page.run("window.fetch = window.real")
        page.run(HIDDEN, "visible")
        page.poke()
        page.shown()
        assert state(page) == ""
    finally:
        page.chrome.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def test_a_broker_whose_redis_hangs_says_that_it_is_alone(chrome: Chrome, tmp_path: Path) -> None:
    redis = RedisServer()
    redis.start()
    try:
        folders = [tmp_path / name for name in ("one", "two")]
        for folder in folders:
            folder.mkdir()
        settings = SETTINGS | {"LMCACHE_BROKER_REDIS_URL": redis.url}
        other = settings | {"LMCACHE_BROKER_INSTANCE_ID": "broker-1"}
        with (
            running_service("lmcache_broker", folders[0], settings) as one,
            running_service("lmcache_broker", folders[1], other) as two,
        ):
            beat(one.url, "vllm-0", {"requested_chunks": 3})
            page = Page(chrome, two.url)
            page.shown()
            assert page.values("[data-total]", "total")["peers"] == "1", (
                "what one knows the other one shows"
            )
            assert "reported by broker-1" in page.texts("#as-of")[0]
            assert state(page) == ""
            redis.pause()
            page.poke()
            eventually(lambda: "cannot reach the others" in state(page), TIMEOUT_S)
            assert page.values("[data-total]", "total")["peers"] == "1"
    finally:
        redis.kill()
