"""The page's files; `tests/page` has what a browser shows of it."""

from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path

import httpx
import pytest
from lmcache_broker.app import create_app
from lmcache_broker.settings import BrokerSettings

from tests.fixtures.broker import write_tokens
from tests.fixtures.sample_service import asgi_client

FOLDER = Path(str(resources.files("lmcache_broker.page") / "static"))
FILES = sorted(path.name for path in FOLDER.iterdir())
SCRIPTS = [name for name in FILES if name.endswith(".js")]


@pytest.fixture
async def rest(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    tokens = write_tokens(tmp_path / "tokens.yaml")
    async with asgi_client(create_app(BrokerSettings(auth_tokens_file=tokens))) as client:
        yield client


async def test_files_are_public_and_figures_are_not(rest: httpx.AsyncClient) -> None:
    shell = await rest.get("/")
    assert (shell.status_code, shell.content) == (200, (FOLDER / "index.html").read_bytes())
    for name in FILES:
        answer = await rest.get(f"/page/{name}")
        assert (answer.status_code, answer.content) == (200, (FOLDER / name).read_bytes())
    assert (await rest.get("/v1/overview")).status_code == 401


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/page.css", "/page/icon.svg"])
async def test_policy_lets_a_browser_load_nothing_else_and_run_nothing_inline(
    rest: httpx.AsyncClient, path: str
) -> None:
    headers = (await rest.get(path)).headers
    policy = dict(
        part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "img-src", "connect-src")} == {
        "'self'"
    }
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["nothing.js", "%2e%2e%2froutes.py", "__init__.py"])
async def test_nothing_but_its_files_is_served(rest: httpx.AsyncClient, name: str) -> None:
    assert (await rest.get(f"/page/{name}")).status_code in (404, 405)


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_text_is_read_as_markup_or_code(name: str) -> None:
    text = (FOLDER / name).read_text()
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "localStorage",
        ".style",
    ):
        assert sink not in text
