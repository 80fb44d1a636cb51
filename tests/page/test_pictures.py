"""The pictures of the documentation: the page after a day of a cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from tests.fixtures.browser import program
from tests.page.cluster import Page
from tests.page.day import broker_after_a_day
from tests.page.test_looks import CUT_OFF, DESK, PHONE

MAX_BYTES = 200_000
MAX_HEIGHT = 1700
LAST_WHOLE_PANEL = """
const ends = [...document.querySelectorAll('section')].filter((panel) => panel.checkVisibility()).map((panel) => panel.getBoundingClientRect().bottom + scrollY + 16);
return Math.ceil(Math.max(...ends.filter((end) => end <= arguments[0])));
"""  # noqa: E501


def reduce(picture: Path) -> None:
    """Let it have 256 colours."""
    command = [program("pngquant"), "--force", "--strip", "--speed=1", f"--output={picture}"]
    subprocess.run([*command, picture], check=True, timeout=60)
    assert picture.stat().st_size < MAX_BYTES


def test_the_pictures_of_the_documentation(
    chrome: Chrome, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    wanted = pytestconfig.getoption("pictures")
    folder = wanted or tmp_path
    chrome.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "UTC"})
    with broker_after_a_day() as url:
        page = Page(chrome, url)
        page.shown()
        for name, (width, height), scheme in (
            ("page", DESK, "light"),
            ("page-dark-phone", PHONE, "dark"),
        ):
            page.colours(scheme)
            page.resize(width, height)
            page.fresh()
            assert page.run(CUT_OFF) == []
            page.resize(width, page.run(LAST_WHOLE_PANEL, MAX_HEIGHT))
            assert chrome.save_screenshot(str(folder / f"{name}.png"))
            if wanted:
                reduce(folder / f"{name}.png")
        assert list(page.values("[data-gain]", "gain")) == ["300", "3600", "86400"]
    page.colours("light")
    chrome.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})
