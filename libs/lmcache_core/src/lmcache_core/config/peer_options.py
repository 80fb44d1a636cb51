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
            "Broker, `http://host:port` or `https://host:port`.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's broker_url",
        ),
    )
    peer_token_file: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "Bearer token file for lookup and broker. Re-read when it changes.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's service_token_file",
        ),
    )
    peer_ticket_keys_file: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "The broker's ticket keys, one `id:base64` per line; peers then need tickets.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's ticket_keys_file",
        ),
    )
    peer_tls_cert_file: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "Certificate (PEM) for peers at an lm+tls `distributed_url`, and as a client. "
            "All `peer_tls` files are re-read when they change.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's tls_cert_file and tls_client_cert_file",
        ),
    )
    peer_tls_key_file: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "Key (PEM, no passphrase), if not in `peer_tls_cert_file`.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's tls_key_file and tls_client_key_file",
        ),
    )
    peer_tls_ca_file: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "CA (PEM) for lookup, broker and peers; none: the system's.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's tls_ca_file",
        ),
    )
    peer_tls_client_ca_file: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "CA (PEM) of client certificates that peers must show; none: no client certificates.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's tls_client_ca_file",
        ),
    )
    peer_tls_name: str | None = field(
        default=None,
        metadata=about(
            "Peers",
            "Name in peers' certificates, if not their host.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's tls_peer_name",
        ),
    )
    peer_allow_plaintext: bool = field(
        default=False,
        metadata=about(
            "Peers",
            "Allow an lm `distributed_url` that other machines reach, on a trusted or "
            "encrypted network.",
            beside_sidecar="set the sidecar's allow_plaintext",
        ),
    )
