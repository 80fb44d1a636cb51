"""What a service shows to those that it calls, and whom it trusts."""

from __future__ import annotations

from pathlib import Path

from lmcache_core.security import ClientTls, TlsFiles, TokenFile, client_context

from lmcache_node.settings import NodeSettings


def shown_token(path: Path | None) -> TokenFile | None:
    """Return the token of `service_token_file`, read again when it changes.

    Raises:
        ConfigError: The file cannot be read or holds no token.
    """
    return None if path is None else TokenFile(path, "service_token_file")


def check_outgoing(settings: NodeSettings) -> None:
    """Refuse files that cannot be used before the service begins to start, so that its log ends
    with that sentence.

    Raises:
        ConfigError: As `shown_token` and `client_tls`, which read them for good.
    """
    shown_token(settings.service_token_file)
    client_tls(settings)


def client_tls(settings: NodeSettings) -> ClientTls:
    """Return the context for `https://` and `lm+tls://`, read again when the files change.

    A service that encrypts, or is told whom to trust, shows its token to no peer that does not
    encrypt.

    Raises:
        ConfigError: A file cannot be read or does not fit.
    """
    files = TlsFiles(
        settings.tls_client_cert_file, settings.tls_client_key_file, settings.tls_ca_file
    )
    context = client_context(files, "tls_client_cert_file")
    return ClientTls(
        context, settings.tls_peer_name, bool(settings.tls_cert_file or settings.tls_ca_file)
    )
