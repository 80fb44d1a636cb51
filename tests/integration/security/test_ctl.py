"""`lmcachectl` against services that encrypt and want a certificate."""

from __future__ import annotations

from pathlib import Path

from tests.fixtures.ctl import Ctl, wait_until_ready
from tests.fixtures.ctl import no_cluster as no_cluster
from tests.fixtures.guarded_services import TOKENS, Guarded, secure


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
