"""`lmcachectl` against services that encrypt and want a certificate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lmcache_ctl.cli import main

from tests.fixtures.ctl import Ctl, wait_until_ready
from tests.fixtures.ctl import no_cluster as no_cluster
from tests.fixtures.guarded_services import TOKENS, Guarded, secure


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKENS["operator"])
    return str(path)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("lookup", ["lookup", "status"]),
    ],
)
def test_it_speaks_to_them(
    guarded: Guarded,
    capsys: pytest.CaptureFixture[str],
    token_file: str,
    name: str,
    command: list[str],
) -> None:
    asked = [
        *command,
        "--url",
        secure(guarded.services[name]),
        "--token-file",
        token_file,
        "-o",
        "json",
    ]
    files = (guarded.authority.file, guarded.pod.cert, guarded.pod.key)
    assert run(*asked, "--tls", ",".join(map(str, files))) == 0
    assert json.loads(capsys.readouterr().out)
    for tls in ([], ["--tls", str(guarded.stranger.file)], ["--tls", str(guarded.authority.file)]):
        assert run(*asked, *tls) == 1, "not trusted, or without a certificate"
        told = capsys.readouterr()
        assert told.out == ""
        assert "no answer from https://" in told.err
        assert "Traceback" not in told.err
    assert run(*asked, "--tls", "/nowhere") == 2, (
        "called wrongly, which is another code than one that fails"
    )
    assert "/nowhere" in capsys.readouterr().err


def test_all_of_them(guarded: Guarded, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKENS["acme-operator"])
    for name in guarded.services:
        with guarded.rest(name) as client:
            wait_until_ready(client)
    urls = [f"--{name}-url={secure(service)}" for name, service in guarded.services.items()]
    ctl = Ctl([*urls, f"--token-file={tmp_path / 'token'}"])
    secured = f"--tls={guarded.authority.file},{guarded.pod.cert},{guarded.pod.key}"
    found = ctl.json("status", secured)
    assert found["totals"]["num_well"] == len(urls)
    untrusted = ctl.text(
        "status", f"--tls={guarded.stranger.file},{guarded.pod.cert},{guarded.pod.key}", code=1
    )
    assert "certificate is not trusted" in untrusted
    assert "no answer" in ctl.text("status", f"--tls={guarded.authority.file}", code=1)
