"""Options that are valid alone and contradict each other."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lmcache_core.config.options import Option
from lmcache_core.config.registry import REMOTE_SCHEMES
from lmcache_core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache_core.config.engine_config import LMCacheEngineConfig

TOKEN_SCHEMES = tuple(name for name, scheme in REMOTE_SCHEMES.items() if scheme.takes_token)
TLS_SCHEME = "lm+tls"


def refuse_contradictions(config: LMCacheEngineConfig, options: Mapping[str, Option]) -> None:
    """Refuse a config whose options contradict one another.

    Args:
        config: Config whose values are all valid.

    Raises:
        ConfigError: They do; the text names the options, their values and the fix, and no secret.
    """

    def said(names: list[str]) -> str:
        return ", ".join(f"{name}={options[name].shown(getattr(config, name))}" for name in names)

    if config.sidecar_socket is None:
        for names, why in _contradictions(config):
            raise ConfigError(f"{said(names.split())}: {why}")
        return
    # With these at their defaults, nothing else contradicts.
    refused = [
        name
        for name, option in options.items()
        if option.beside_sidecar and getattr(config, name) not in (None, option.default)
    ]
    if refused:
        fixes = "; ".join(dict.fromkeys(options[name].beside_sidecar for name in refused))
        raise ConfigError(
            f"{said(refused)}, sidecar_socket={config.sidecar_socket!r}: the tiers are the"
            f" sidecar's; {fixes}"
        )


def _contradictions(c: LMCacheEngineConfig) -> Iterator[tuple[str, str]]:
    """Yield the options that contradict one another, and why, with the fix."""
    remote_scheme = urlsplit(c.remote_url or "").scheme
    if c.local_disk is not None and c.max_local_disk_size <= 0:
        yield (
            "local_disk max_local_disk_size",
            "a disk without room keeps nothing; set max_local_disk_size to its size in GB",
        )
    if c.max_local_cpu_size <= 0:
        yield (
            "max_local_cpu_size",
            "chunks pass through host memory on their way to and from every tier, with local_cpu"
            " off too; give it some GB",
        )
    if not (c.local_cpu or c.local_disk or c.remote_url):
        yield (
            "local_cpu",
            "nothing is left to keep chunks in; set local_cpu to true, or one of local_disk,"
            " remote_url",
        )
    if c.disk_fsync and c.local_disk is None:
        yield (
            "disk_fsync local_disk",
            "there is no disk to sync; set local_disk or leave disk_fsync out",
        )
    if c.local_disk_serde != "naive" and c.local_disk is None:
        yield (
            "local_disk_serde local_disk",
            "there is no disk to encode for; set local_disk or leave local_disk_serde out",
        )
    if c.remote_token_file and c.remote_url and remote_scheme not in TOKEN_SCHEMES:
        yield (
            "remote_token_file remote_url",
            f"only {', '.join(TOKEN_SCHEMES)} take a bearer token; put Redis' password into its"
            " URL, and leave remote_token_file out",
        )
    if (c.remote_tls_ca_file or c.remote_tls_cert_file) and remote_scheme != TLS_SCHEME:
        yield (
            "remote_url remote_tls_ca_file remote_tls_cert_file",
            f"nothing there is encrypted; write a remote_url with {TLS_SCHEME}, or leave the"
            " files out",
        )
    if c.remote_tls_key_file is not None and c.remote_tls_cert_file is None:
        yield (
            "remote_tls_key_file remote_tls_cert_file",
            "a key without its certificate; set remote_tls_cert_file or leave remote_tls_key_file"
            " out",
        )
    if c.enable_p2p:
        yield from _contradictions_of_a_peer(c)


def _contradictions_of_a_peer(c: LMCacheEngineConfig) -> Iterator[tuple[str, str]]:
    if not (c.lookup_url and c.broker_url and c.distributed_url):
        yield (
            "enable_p2p lookup_url broker_url distributed_url",
            "peers are found by lookup and broker, and reach this engine at its distributed_url;"
            " set all three",
        )
        return
    try:
        url = urlsplit(c.distributed_url)
        is_address = bool(url.port and url.hostname and url.scheme in ("lm", "lm+tls"))
    except ValueError:
        is_address = False
    if not is_address or url.path or url.username or url.query:
        yield (
            "enable_p2p distributed_url",
            "peers reach an engine at lm+tls://host:port or lm://host:port",
        )
        return
    try:
        is_loopback = ipaddress.ip_address(url.hostname or "").is_loopback
    except ValueError:  # a name
        is_loopback = False
    is_encrypted = url.scheme == TLS_SCHEME
    if not c.peer_ticket_keys_file and not is_loopback:
        yield (
            "enable_p2p distributed_url peer_ticket_keys_file",
            "other machines can reach it without credentials; set peer_ticket_keys_file to"
            " the keys that the broker signs with",
        )
    if is_encrypted and c.peer_tls_cert_file is None:
        yield (
            "distributed_url peer_tls_cert_file",
            "what is encrypted there needs a certificate; set peer_tls_cert_file to one that names"
            " the host, or the peer_tls_name of peers",
        )
    if not is_encrypted and (c.peer_tls_cert_file or c.peer_tls_client_ca_file):
        yield (
            "distributed_url peer_tls_cert_file peer_tls_client_ca_file",
            "nothing there is encrypted; write a distributed_url with lm+tls, or leave the files"
            " out",
        )
    if c.peer_tls_key_file is not None and c.peer_tls_cert_file is None:
        yield (
            "peer_tls_key_file peer_tls_cert_file",
            "a key without its certificate; set peer_tls_cert_file or leave peer_tls_key_file out",
        )
    if not (is_encrypted or is_loopback or c.peer_allow_plaintext):
        yield (
            "distributed_url peer_allow_plaintext",
            "other machines reach it, and chunks and tickets could be read on their way; write it"
            " with lm+tls and set peer_tls_cert_file, or set peer_allow_plaintext to true if the"
            " network is trusted or encrypts by itself",
        )
