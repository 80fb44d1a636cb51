"""The page by keyboard, on a phone, in the dark, for a screen reader, and with a token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import JavascriptException
from selenium.webdriver import ActionChains, Chrome, Keys

from tests.fixtures.neighbourhood import eventually
from tests.fixtures.service_process import running_service
from tests.page.cluster import PODS, STORAGE, Cluster, Page, beat

TOKEN = "a-known-token-0123456789"
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
CUT_OFF = (Path(__file__).parent / "cut_off.js").read_text()
MIN_CONTRAST = 4.5
PHONE = (390, 844)
DESK = (1440, 900)


@pytest.fixture
def page(chrome: Chrome, cluster: Cluster) -> Iterator[Page]:
    cluster.until_reported()
    opened = Page(chrome, cluster.url)
    opened.resize(*DESK)
    opened.shown()
    yield opened
    opened.resize(*DESK)
    opened.colours("light")


def ax_nodes(page: Page) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = page.chrome.execute_cdp_cmd("Accessibility.getFullAXTree", {})[
        "nodes"
    ]
    return [node for node in nodes if not node.get("ignored")]


def test_the_browser_has_nothing_to_complain_of(page: Page) -> None:
    assert page.complaints() == []
    loaded = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded
    assert all(name.startswith(page.chrome.current_url) for name in loaded)


def test_the_policy_holds(page: Page) -> None:
    with pytest.raises(JavascriptException, match="TrustedScript"):
        page.run("document.body.setAttribute('onclick', 'document.title = 1')")
    with pytest.raises(JavascriptException, match="TrustedHTML"):
        page.run("document.body.innerHTML = '<b>x</b>'")
    page.run("document.body.setAttribute('style', 'color: red')")
    assert any("Content Security Policy" in message for message in page.complaints())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(page: Page, scheme: str) -> None:
    page.colours(scheme)
    found = page.run(CONTRAST)
    assert len(found) > 50
    assert {text: ratio for text, ratio in found if ratio < MIN_CONTRAST} == {}
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 23, 26)") == (scheme == "dark")


def test_everything_has_a_name(page: Page) -> None:
    nodes = ax_nodes(page)
    nameless = [
        node["role"]["value"]
        for node in nodes
        if node["role"]["value"]
        in ("image", "img", "meter", "progressbar", "textbox", "button", "link", "region", "group")
        and not node.get("name", {}).get("value")
    ]
    assert nameless == []
    assert {"heading", "table", "columnheader", "rowheader", "status", "main", "banner"} <= {
        node["role"]["value"] for node in nodes
    }


def test_it_is_walked_through_by_keyboard(page: Page) -> None:
    met = []
    for _ in range(12):
        ActionChains(page.chrome).send_keys(Keys.TAB).perform()
        met.append(
            page.run(
                "const at = document.activeElement; return at.getAttribute('aria-label') ??"
                " at.textContent"
            )
        )
        assert page.run("return getComputedStyle(document.activeElement).outlineStyle") != "none"
        if met[-1] == "Links as a table":
            break
    assert met[0] == "Skip to the content"
    assert met[-1] == "Links as a table"
    ActionChains(page.chrome).send_keys(Keys.ENTER).perform()
    page.next_turn()
    assert page.run("return document.activeElement.textContent") == "Links as a table", (
        "new figures leave it where it is"
    )
    assert page.run("return document.querySelector('#topology details').open"), "and unfolded"
    ActionChains(page.chrome).send_keys(Keys.TAB).perform()
    assert (
        page.run("return document.activeElement.getAttribute('aria-label')")
        == "Since the start of each pulling pod"
    )


def test_new_figures_move_neither_scroll_nor_selection(page: Page) -> None:
    page.resize(*PHONE)
    eventually(
        lambda: page.run("return document.querySelector('#topology svg').clientWidth") < PHONE[0]
    )
    page.resize(200, PHONE[1])
    page.run("document.querySelector('#peers .scroll').scrollLeft = 40")
    page.next_turn()
    assert page.run("return document.querySelector('#peers .scroll').scrollLeft") == 40
    page.run("getSelection().selectAllChildren(document.querySelector('#hot code'))")
    chosen = page.run("return String(getSelection())")
    page.next_turn()
    assert page.run("return String(getSelection())") == chosen != ""
    page.run("getSelection().removeAllRanges()")


def test_nothing_moves_by_itself(page: Page) -> None:
    """There is nothing that `prefers-reduced-motion` would have to stop."""
    page.next_turn()
    assert page.run("return document.getAnimations().length") == 0
    moving = (
        "return [...document.querySelectorAll('*')].filter((n) =>"
        " parseFloat(getComputedStyle(n).transitionDuration) > 0).length"
    )
    assert page.run(moving) == 0


@pytest.mark.parametrize(("width", "height"), [DESK, PHONE])
def test_nothing_is_cut_off(page: Page, width: int, height: int) -> None:
    page.resize(width, height)
    eventually(
        lambda: page.run("return document.querySelector('#topology svg').clientWidth") < width
    )
    assert page.run(CUT_OFF) == []
    drawn = page.texts("#topology [data-peer] text")
    assert sorted(drawn) == sorted(name.removeprefix("cache-lmcache-") for name in (*PODS, STORAGE))


def test_it_fits_a_phone(page: Page) -> None:
    page.resize(*PHONE)
    eventually(
        lambda: page.run("return document.querySelector('#topology svg').clientWidth") < PHONE[0]
    )
    assert page.run("return document.documentElement.scrollWidth") <= PHONE[0]
    small = (
        "return Math.min(...[...document.querySelectorAll('svg text')].map((text) =>"
        " text.getBoundingClientRect().height))"
    )
    assert page.run(small) >= 10


def test_a_token_is_asked_for_and_kept_in_the_tab_alone(chrome: Chrome, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(f"tokens:\n  - {{name: one, tenant: one, role: client, token: {TOKEN}}}\n")
    settings = {"LMCACHE_BROKER_PORT": "0", "LMCACHE_BROKER_AUTH_TOKENS_FILE": str(tokens)}
    with running_service("lmcache_broker", tmp_path, settings) as broker:
        page = Page(chrome, broker.url)

        def enter(token: str) -> None:
            eventually(lambda: page.run("return !document.getElementById('login').hidden"))
            field = chrome.switch_to.active_element
            assert field.get_attribute("id") == "token", "one may begin to type"
            field.send_keys(token, Keys.ENTER)

        enter("not-the-token-0123456789")
        eventually(lambda: page.texts("#login-error") == ["The broker does not know this token."])
        assert page.run(
            "return document.getElementById('overview').hidden && sessionStorage.length === 0"
        )
        for scheme in ("dark", "light"):
            page.colours(scheme)
            assert {text: ratio for text, ratio in page.run(CONTRAST) if ratio < MIN_CONTRAST} == {}
        colours = page.run(
            "return ['login-error', 'token-note'].map((id) =>"
            " getComputedStyle(document.getElementById(id)).color)"
        )
        assert colours[0] != colours[1], "what is wrong stands out"
        enter(TOKEN)
        page.shown()
        assert page.run(
            "return [sessionStorage.length, localStorage.length, document.cookie, location.search]"
        ) == [1, 0, "", ""]
        assert TOKEN not in chrome.page_source
        page.fresh()
        first = chrome.current_window_handle
        chrome.switch_to.new_window("tab")
        chrome.get(broker.url)
        eventually(
            lambda: page.run(
                "return !document.getElementById('login').hidden && sessionStorage.length === 0"
            )
        )
        chrome.close()
        chrome.switch_to.window(first)
        chrome.find_element("id", "leave").click()
        eventually(
            lambda: page.run(
                "return !document.getElementById('login').hidden && sessionStorage.length === 0"
            )
        )
        assert page.run("return document.getElementById('overview').hidden")


def test_an_admin_sees_what_each_tenant_saved(chrome: Chrome, tmp_path: Path) -> None:
    tokens = {name: f"{name}-token-0123456789" for name in ("operator", "team-a", "team-b")}
    (tmp_path / "tokens.yaml").write_text(
        "tokens:\n"
        + "".join(
            f"  - {{name: {name}, tenant: {name}, token: {token},"
            f" role: {'admin' if name == 'operator' else 'client'}}}\n"
            for name, token in tokens.items()
        )
    )
    settings = {
        "LMCACHE_BROKER_PORT": "0",
        "LMCACHE_BROKER_AUTH_TOKENS_FILE": str(tmp_path / "tokens.yaml"),
        "LMCACHE_BROKER_HISTORY_INTERVAL_S": "1",
    }
    with running_service("lmcache_broker", tmp_path, settings) as broker:

        def saved(num_tokens: int) -> None:
            for name, share in (("team-a", 1), ("team-b", 3)):
                models = {"org/model": {"saved_tokens": share * num_tokens, "saved_ms": num_tokens}}
                beat(broker.url, f"pod-of-{name}", {"models": models}, tokens[name])

        saved(0)
        time.sleep(2.5)  # the broker has seen these
        saved(1000)
        page = Page(chrome, broker.url)
        eventually(lambda: page.run("return !document.getElementById('login').hidden"))
        chrome.switch_to.active_element.send_keys(tokens["operator"], Keys.ENTER)
        page.shown()

        def rows() -> list[str]:
            page.fresh()
            return page.texts("#gains [data-row^='tenant ']")

        eventually(lambda: len(rows()) == 2)
        assert rows() == ["team-b3,0001.0 s", "team-a1,0001.0 s"]
        chrome.find_element("id", "leave").click()
        eventually(lambda: page.run("return !document.getElementById('login').hidden"))
        chrome.switch_to.active_element.send_keys(tokens["team-a"], Keys.ENTER)
        page.shown()
        assert rows() == []
        assert "team-b" not in chrome.page_source
        chrome.find_element("id", "leave").click()
