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


def test_servers_speak_1_3_and_resume_no_session(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    context = server_context(TlsFiles(pair.cert, pair.key))._contexts.current()
    assert (context.minimum_version, context.num_tickets, context.verify_mode) == (
        ssl.TLSVersion.TLSv1_3,
        0,
        ssl.CERT_NONE,
    )
    mutual = server_context(TlsFiles(pair.cert, pair.key, authority.file))._contexts.current()
    assert mutual.verify_mode == ssl.CERT_REQUIRED


def test_clients_always_check_whom_they_speak_to(tmp_path: Path) -> None:
    for context in (
        client_context()._contexts.current(),
        client_context(TlsFiles(ca_file=Authority(tmp_path).file))._contexts.current(),
        no_context(),
    ):
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert no_context().get_ca_certs() == []


@pytest.mark.parametrize("year", [2025, 2049, 2050, 2120])
def test_the_end_of_a_certificate_is_read(tmp_path: Path, year: int) -> None:
    """From 2050 on X.509 writes years with four digits."""
    end = datetime.datetime(year, 3, 4, 5, 6, 7, tzinfo=datetime.UTC)
    signed = Authority(tmp_path)._ca.issue_cert(
        "127.0.0.1", not_before=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), not_after=end
    )
    file = tmp_path / "both.pem"
    file.write_bytes(
        signed.private_key_pem.bytes() + b"".join(blob.bytes() for blob in signed.cert_chain_pems)
    )
    begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    assert certificate_validity(file) == (begin.timestamp(), end.timestamp())


@pytest.mark.parametrize(
    "content", [b"", b"no PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_what_is_no_certificate_has_no_end(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pem").write_bytes(content)
    with pytest.raises(ConfigError, match=r"x.pem: .* certificate"):
        certificate_validity(tmp_path / "x.pem")


@pytest.mark.parametrize(
    ("pair_of", "reason"),
    [(ended_pair, "ended on 2025-03-01"), (early_pair, "is not valid before 2100-02-01")],
)
def test_a_certificate_out_of_its_time_is_told_and_does_not_stop_the_service(
    pair_of: Callable[[Authority], Pair],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it does for its own pod needs no certificate, and files are read again when they are
    replaced.
    """
    pair = pair_of(Authority(tmp_path))
    with caplog.at_level(logging.WARNING):
        server_context(TlsFiles(pair.cert, pair.key))
        client_context(TlsFiles(pair.cert, pair.key))
    assert [record.getMessage().split(": ")[0] for record in caplog.records] == [
        "peers that verify this certificate refuse it"
    ] * 2
    assert f"file={pair.cert} reason={reason}" in caplog.text


@pytest.mark.parametrize("label", ["X509 CERTIFICATE", "TRUSTED CERTIFICATE"])
def test_the_end_is_read_whatever_label_openssl_takes(tmp_path: Path, label: str) -> None:
    """To know the end is worth a warning, never a refusal of what serves."""
    pair = Authority(tmp_path).sign("server")
    validity = certificate_validity(pair.cert)
    pair.cert.write_text(pair.cert.read_text().replace("CERTIFICATE", label))
    server_context(TlsFiles(pair.cert, pair.key))
    assert certificate_validity(pair.cert) == validity


def test_one_file_may_hold_certificate_and_key(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("server")
    both = tmp_path / "both.pem"
    both.write_bytes(pair.key.read_bytes() + pair.cert.read_bytes())
    server_context(TlsFiles(both))


@pytest.mark.parametrize(
    "kind", ["missing", "empty", "no PEM", "another's key", "passphrase", "missing CA", "empty CA"]
)
def test_what_does_not_fit_is_refused_by_name_and_without_content(
    tmp_path: Path, kind: str
) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.sign("server"), authority.sign("other")
    ca = authority.file
    match kind:
        case "missing":
            pair.key.unlink()
        case "empty":
            pair.cert.write_text("")
        case "no PEM":
            pair.key.write_text("a secret that is no PEM")
        case "another's key":
            pair.key.write_bytes(other.key.read_bytes())
        case "passphrase":
            key = load_pem_private_key(pair.key.read_bytes(), None)
            pair.key.write_bytes(
                key.private_bytes(
                    Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"hunter2")
                )
            )
        case "missing CA":
            ca = tmp_path / "absent"
        case "empty CA":
            ca = tmp_path / "nothing"
            ca.write_text("")
    options = "my_cert_file", "my_key_file", "my_ca_file"
    with pytest.raises(ConfigError) as caught:
        server_context(TlsFiles(pair.cert, pair.key, ca, options))
    text = str(caught.value)
    assert (f"my_ca_file={ca}" if "CA" in kind else f"my_key_file={pair.key}") in text
    assert "a secret that" not in text
    assert kind != "passphrase" or "has a passphrase" in text


def test_who_goes_round_it_gets_no_connection(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("server")
    context = server_context(TlsFiles(pair.cert, pair.key))
    assert context.get_ca_certs() == []
    assert context.verify_mode == ssl.CERT_REQUIRED


def test_who_hangs_up_without_a_word_may_miss_a_certificate(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("client")
    options = "my_cert_file", "my_key_file", "my_ca_file"
    assert (
        why_silent(client_context(TlsFiles(options=options)))
        == "; if it requires a certificate of its callers, set my_cert_file"
    )
    assert "must have signed that in my_cert_file" in why_silent(
        client_context(TlsFiles(pair.cert, pair.key, options=options))
    )
    assert [why_silent(context) for context in (None, no_context(), client_context())] == [""] * 3
