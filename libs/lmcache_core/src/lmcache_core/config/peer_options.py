"""This library's own options of an engine among peers; what they do together is in
docs/operations.md.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from lmcache_core.config.options import NON_EMPTY, about


@dataclass(frozen=True, repr=False)
class PeerOptions:
    """Lookup, broker and peers: where they are, what they are shown, and how what goes between
    is protected.
    """

    _: KW_ONLY
    broker_url: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "The broker, `http://host:port` or `https://host:port`.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's broker_url",
        ),
    )
    peer_token_file: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "File with the bearer token for lookup and broker. Read again when it changes.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's service_token_file",
        ),
    )
    peer_ticket_keys_file: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "Keys that the broker signs tickets with, `id:base64`, one a line; peers are then"
            " served by ticket alone.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's ticket_keys_file",
        ),
    )
    peer_tls_cert_file: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "Certificate (PEM) that peers are served with at a `distributed_url` with lm+tls, and"
            " that is shown to lookup, broker and peers that ask for one. Read again when it"
            " changes, as the other `peer_tls` files.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's tls_cert_file and tls_client_cert_file",
        ),
    )
    peer_tls_key_file: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "Key (PEM, no passphrase) of `peer_tls_cert_file`, where it is not in the same file.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's tls_key_file and tls_client_key_file",
        ),
    )
    peer_tls_ca_file: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "Authorities (PEM) that may sign the certificates of lookup and broker behind https,"
            " and of peers behind lm+tls; none: those of this machine.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's tls_ca_file",
        ),
    )
    peer_tls_client_ca_file: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "Authorities (PEM), one of which must have signed a certificate that peers show at"
            " `distributed_url`; none: they show none.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's tls_client_ca_file",
        ),
    )
    peer_tls_name: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "What the certificates of peers name, where that is not the host of their URL.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's tls_peer_name",
        ),
    )
    peer_allow_plaintext: bool = field(
        default=False,
        metadata=about(
            "Peers",
            "Allows a `distributed_url` with lm that other machines reach: chunks and tickets cross"
            " a network that is trusted, or encrypts by itself.",
            beside_sidecar="set the sidecar's allow_plaintext",
        ),
    )
