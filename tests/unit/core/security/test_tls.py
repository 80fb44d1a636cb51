import datetime
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from lmcache_core.errors import ConfigError
from lmcache_core.security import TlsFiles, client_context, no_context, server_context, why_silent
from lmcache_core.security.tls import certificate_validity

from tests.fixtures.tls import Authority, Pair, early_pair, ended_pair

OPTIONS = "my_cert_file", "my_key_file", "my_ca_file"


def in_force(context: ssl.SSLContext, server_side: bool) -> ssl.SSLContext:
    """The context of the next connection."""
    host = None if server_side else "server.example"
    return context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side, host).context


def test_servers_speak_tls_1_3_and_resume_no_session(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    context = in_force(server_context(TlsFiles(pair.cert, pair.key)), True)
    assert (context.minimum_version, context.num_tickets) == (ssl.TLSVersion.TLSv1_3, 0)
    assert context.verify_mode == ssl.CERT_NONE
    mutual = in_force(server_context(TlsFiles(pair.cert, pair.key, authority.file)), True)
    assert mutual.verify_mode == ssl.CERT_REQUIRED


def test_clients_always_check_the_server(tmp_path: Path) -> None:
    for context in (
        in_force(client_context(), False),
        in_force(client_context(TlsFiles(ca_file=Authority(tmp_path).file)), False),
        no_context(),
    ):
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert no_context().get_ca_certs() == []


def test_bypassing_the_methods_of_a_context_allows_no_connection(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("server")
    context = server_context(TlsFiles(pair.cert, pair.key))
    assert context.get_ca_certs() == []
    assert context.verify_mode == ssl.CERT_REQUIRED


@pytest.mark.parametrize("year", [2049, 2050])
def test_validity_of_a_certificate_is_read(tmp_path: Path, year: int) -> None:
    """From 2050 on X.509 writes years with four digits."""
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    end = datetime.datetime(year, 3, 4, 5, 6, 7, tzinfo=datetime.UTC)
    authority.renew(pair, not_before=begin, not_after=end)
    assert certificate_validity(pair.cert) == (begin.timestamp(), end.timestamp())


@pytest.mark.parametrize(
    "content", [b"no PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_file_without_a_certificate_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pem").write_bytes(content)
    with pytest.raises(ConfigError, match=r"x.pem: .* certificate"):
        certificate_validity(tmp_path / "x.pem")


@pytest.mark.parametrize(
    ("pair_of", "reason"),
    [(ended_pair, "ended on 2025-03-01"), (early_pair, "is not valid before 2100-02-01")],
)
def test_invalid_certificate_is_logged_and_does_not_stop_the_service(
    pair_of: Callable[[Authority], Pair],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Callers in the same pod need no certificate, and files are read again when replaced."""
    pair = pair_of(Authority(tmp_path))
    with caplog.at_level(logging.WARNING):
        server_context(TlsFiles(pair.cert, pair.key))
        client_context(TlsFiles(pair.cert, pair.key))
    assert caplog.text.count("peers that verify this certificate refuse it") == 2
    assert f"file={pair.cert} reason={reason}" in caplog.text


@pytest.mark.parametrize("label", ["X509 CERTIFICATE", "TRUSTED CERTIFICATE"])
def test_validity_is_read_under_every_label_that_openssl_takes(tmp_path: Path, label: str) -> None:
    """It is worth a warning, and no refusal of a good certificate."""
    pair = Authority(tmp_path).sign("server")
    validity = certificate_validity(pair.cert)
    pair.cert.write_text(pair.cert.read_text().replace("CERTIFICATE", label))
    server_context(TlsFiles(pair.cert, pair.key))
    assert certificate_validity(pair.cert) == validity


@pytest.mark.parametrize(
    "kind", ["missing", "no PEM", "another's key", "passphrase", "missing CA", "empty CA"]
)
def test_file_that_does_not_fit_is_named_and_not_shown(tmp_path: Path, kind: str) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.sign("server"), authority.sign("other")
    ca = authority.file
    match kind:
        case "missing":
            pair.key.unlink()
        case "no PEM":
            pair.key.write_text("a secret that is no PEM")
        case "another's key":
            pair.key.write_bytes(other.key.read_bytes())
        case "passphrase":
            key = load_pem_private_key(pair.key.read_bytes(), None)
            encryption = BestAvailableEncryption(b"hunter2")
            encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
            pair.key.write_bytes(encrypted)
        case "missing CA":
            ca = tmp_path / "absent"
        case "empty CA":
            ca = tmp_path / "nothing"
            ca.write_text("")
    with pytest.raises(ConfigError) as caught:
        server_context(TlsFiles(pair.cert, pair.key, ca, OPTIONS))
    text = str(caught.value)
    assert (f"my_ca_file={ca}" if "CA" in kind else f"my_key_file={pair.key}") in text
    assert "a secret that" not in text
    assert kind != "passphrase" or "has a passphrase" in text


def test_silent_server_may_miss_a_certificate(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("client")
    without = client_context(TlsFiles(options=OPTIONS))
    assert "requires a certificate of its callers, set my_cert_file" in why_silent(without)
    shown = client_context(TlsFiles(pair.cert, pair.key, options=OPTIONS))
    assert "must have signed that in my_cert_file" in why_silent(shown)
    assert [why_silent(context) for context in (None, no_context(), client_context())] == [""] * 3


def test_one_file_may_hold_certificate_and_key(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("server")
    both = tmp_path / "both.pem"
    both.write_bytes(pair.key.read_bytes() + pair.cert.read_bytes())
    server_context(TlsFiles(both))
