"""Where settings come from, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.ctl import Ctl
from tests.fixtures.http_server import Handler, served


def urls_of(environ: dict[str, str], *options: str) -> list[str]:
    """The addresses that are asked; nothing listens at any."""
    found = Ctl([], environ).json("status", *options, code=1)["services"]
    return [one["url"] for one in found]


def test_options_win_over_variables() -> None:
    environ = {
        "LMCACHE_CTL_BROKER_URLS": "http://127.0.0.1:1, http://127.0.0.1:2",
        "LMCACHE_CTL_STORAGE_URLS": "http://127.0.0.1:3",
        "LMCACHE_CTL_TOKEN_FILE": "",
        "LMCACHE_LOOKUP_PORT": "1",
    }
    brokers = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert urls_of(environ) == [*brokers, "http://127.0.0.1:3"]
    option = "--storage-url=http://127.0.0.1:4"
    assert urls_of(environ, option) == [*brokers, "http://127.0.0.1:4"]


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"LMCACHE_CTL_TIMEOUT_S": "soon"}, "soon: must be a number above 0"),
        ({"LMCACHE_CTL_TIMEOUT_S": "soon"}, "'--timeout' (env var: 'LMCACHE_CTL_TIMEOUT_S')"),
        (
            {"LMCACHE_CTL_TIMEOUT": "1"},
            "LMCACHE_CTL_TIMEOUT sets nothing; did you mean 'LMCACHE_CTL_TIMEOUT_S'",
        ),
        (
            {"LMCACHE_CTL_TOKN": "s3cret"},
            "LMCACHE_CTL_TOKN sets nothing; did you mean 'LMCACHE_CTL_TOKEN'",
        ),
        ({"LMCACHE_CTL_SIDECAR_URLS": "h:1"}, "'h:1': an address begins with http://"),
        ({"LMCACHE_CTL_SIDECAR_URLS": "h:1"}, "'--sidecar-url' (env var:"),
        (
            {"LMCACHE_CTL_TOKEN": "s3cret", "LMCACHE_CTL_TOKEN_FILE": "/nowhere"},
            "LMCACHE_CTL_TOKEN and LMCACHE_CTL_TOKEN_FILE are both set",
        ),
    ],
)
def test_what_is_wrong_is_named_with_where_it_is_from(environ: dict[str, str], said: str) -> None:
    shown = Ctl([], environ).text("status", code=2)
    assert said in shown
    assert "s3cret" not in shown


class ShowsToken(Handler):
    """A lookup service whose only tenant is the header with the caller's token."""

    def do_GET(self) -> None:
        self.answer(200, {"tenants": [self.headers["authorization"]], "next_after": None})


@pytest.mark.parametrize("text", ["s3cret-0123456789\n", " s3cret-0123456789\r\n"])
def test_a_token_from_a_file_ends_in_a_newline(text: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(text)
    with served(ShowsToken) as url:
        for options, environ in (
            ([], {"LMCACHE_CTL_TOKEN": text}),
            ([f"--token-file={tmp_path / 'token'}"], {"LMCACHE_CTL_TOKEN": "another"}),
        ):
            sent = Ctl(options, environ).text("lookup", "tenants", "--url", url)
            assert sent == "Bearer s3cret-0123456789\n"


@pytest.mark.parametrize("text", ["s3cret\n0123456789", "s3cret 0123456789", "\n", "s3crët"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(text: str) -> None:
    shown = Ctl([], {"LMCACHE_CTL_TOKEN": text}).text("status", code=2)
    assert "LMCACHE_CTL_TOKEN must be visible ASCII characters" in shown
    assert "s3cr" not in shown


def test_an_address_for_the_only_kind_that_is_asked() -> None:
    environ = {"LMCACHE_CTL_LOOKUP_URLS": "http://127.0.0.1:1"}
    said = Ctl(["--url=http://127.0.0.1:2"], environ).text("lookup", "status", code=1)
    assert "no answer from http://127.0.0.1:2" in said
    assert said.endswith("; its address is from --lookup-url\n")
