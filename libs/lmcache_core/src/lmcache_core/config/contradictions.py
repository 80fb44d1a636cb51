"""Options that are fine alone and cannot be had together."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from lmcache_core.config.options import Option
from lmcache_core.config.registry import REMOTE_SCHEMES
from lmcache_core.errors import ConfigError

if TYPE_CHECKING:
    from lmcache_core.config.engine_config import LMCacheEngineConfig

TOKEN_SCHEMES = tuple(name for name, scheme in REMOTE_SCHEMES.items() if scheme.takes_token)
TLS_SCHEMES = ("lm+tls", "https")


@dataclass(frozen=True)
class Contradiction:
    """Options that contradict one another.

    Attributes:
        names: The options, as the refusal shows them.
        holds: Whether a config has it.
        why: The reason, and what to do instead.
    """

    names: tuple[str, ...]
    holds: Callable[[LMCacheEngineConfig], bool]
    why: str


CONTRADICTIONS = (
    Contradiction(
        ("local_disk", "max_local_disk_size"),
        lambda c: c.local_disk is not None and c.max_local_disk_size <= 0,
        "a disk without room keeps nothing; set max_local_disk_size to its size in GB",
    ),
    Contradiction(
        ("max_local_cpu_size",),
        lambda c: c.sidecar_socket is None and c.max_local_cpu_size <= 0,
        "chunks pass through host memory on their way to and from every tier, with local_cpu off"
        " too; give it some GB",
    ),
    Contradiction(
        ("local_cpu",),
        lambda c: not (c.local_cpu or c.local_disk or c.remote_url or c.sidecar_socket),
        "nothing is left to keep chunks in; set local_cpu to true, or one of local_disk,"
        " remote_url",
    ),
    Contradiction(
        ("disk_fsync", "local_disk"),
        lambda c: c.disk_fsync and c.local_disk is None and c.sidecar_socket is None,
        "there is no disk to sync; set local_disk or leave disk_fsync out",
    ),
    Contradiction(
        ("local_disk_serde", "local_disk"),
        lambda c: (
            c.local_disk_serde != "naive" and c.local_disk is None and c.sidecar_socket is None
        ),
        "there is no disk to encode for; set local_disk or leave local_disk_serde out",
    ),
    Contradiction(
        ("remote_token_file", "remote_url"),
        lambda c: (
            bool(c.remote_token_file and c.remote_url)
            and urlsplit(c.remote_url).scheme not in TOKEN_SCHEMES
        ),
        f"only {', '.join(TOKEN_SCHEMES)} take a bearer token; put Redis' password into its URL,"
        " and leave remote_token_file out",
    ),
    Contradiction(
        ("remote_url", "remote_tls_ca_file", "remote_tls_cert_file"),
        lambda c: (
            bool(c.remote_tls_ca_file or c.remote_tls_cert_file)
            and c.sidecar_socket is None
            and urlsplit(c.remote_url or "").scheme not in TLS_SCHEMES
        ),
        f"nothing there is encrypted; write a remote_url with {' or '.join(TLS_SCHEMES)}, or leave"
        " the files out",
    ),
    Contradiction(
        ("remote_tls_key_file", "remote_tls_cert_file"),
        lambda c: (
            c.sidecar_socket is None
            and c.remote_tls_key_file is not None
            and c.remote_tls_cert_file is None
        ),
        "a key without its certificate; set remote_tls_cert_file or leave remote_tls_key_file out",
    ),
    Contradiction(
        ("enable_p2p", "lookup_url", "broker_url", "distributed_url"),
        lambda c: _is_peer(c) and not (c.lookup_url and c.broker_url and c.distributed_url),
        "peers are found by lookup and broker, and reach this engine at its distributed_url; set"
        " all three",
    ),
    Contradiction(
        ("enable_p2p", "distributed_url"),
        lambda c: _is_peer(c) and not _is_lm_address(c.distributed_url or ""),
        "peers reach an engine at lm+tls://host:port or lm://host:port",
    ),
    Contradiction(
        ("enable_p2p", "distributed_url", "peer_ticket_keys_file"),
        lambda c: (
            _is_peer(c)
            and not c.peer_ticket_keys_file
            and not _is_loopback(c.distributed_url or "")
        ),
        "other machines reach it, and nothing is asked of them; set peer_ticket_keys_file to the"
        " keys that the broker signs with",
    ),
    Contradiction(
        ("distributed_url", "peer_tls_cert_file"),
        lambda c: _is_peer(c) and _is_encrypted(c) and c.peer_tls_cert_file is None,
        "what is encrypted there needs a certificate; set peer_tls_cert_file to one that names the"
        " host, or the peer_tls_name of peers",
    ),
    Contradiction(
        ("distributed_url", "peer_tls_cert_file", "peer_tls_client_ca_file"),
        lambda c: (
            _is_peer(c)
            and not _is_encrypted(c)
            and bool(c.peer_tls_cert_file or c.peer_tls_client_ca_file)
        ),
        "nothing there is encrypted; write a distributed_url with lm+tls, or leave the files out",
    ),
    Contradiction(
        ("peer_tls_key_file", "peer_tls_cert_file"),
        lambda c: _is_peer(c) and c.peer_tls_key_file is not None and c.peer_tls_cert_file is None,
        "a key without its certificate; set peer_tls_cert_file or leave peer_tls_key_file out",
    ),
    Contradiction(
        ("distributed_url", "peer_allow_plaintext"),
        lambda c: (
            _is_peer(c)
            and not (
                _is_encrypted(c) or c.peer_allow_plaintext or _is_loopback(c.distributed_url or "")
            )
        ),
        "other machines reach it, and chunks and tickets could be read on their way; write it with"
        " lm+tls and set peer_tls_cert_file, or set peer_allow_plaintext to true if the network is"
        " trusted or encrypts by itself",
    ),
)


def _is_peer(config: LMCacheEngineConfig) -> bool:
    return config.enable_p2p and config.sidecar_socket is None


def _is_encrypted(config: LMCacheEngineConfig) -> bool:
    parts = _split(config.distributed_url or "")
    return parts is not None and parts.scheme in TLS_SCHEMES


def _is_lm_address(url: str) -> bool:
    parts = _split(url)
    return (
        parts is not None
        and parts.scheme in ("lm", "lm+tls")
        and bool(parts.hostname)
        and not (parts.path or parts.username or parts.query)
    )


def _is_loopback(url: str) -> bool:
    parts = _split(url)
    try:
        return parts is not None and ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        return parts if parts.port else None
    except ValueError:
        return None


def refuse_contradictions(config: LMCacheEngineConfig, options: Mapping[str, Option]) -> None:
    """Refuse a config whose options contradict one another.

    Args:
        config: Each of its values is possible.
        options: All options.

    Raises:
        ConfigError: They do; the text names the options, their values and the fix, and no secret.
    """
    if config.sidecar_socket is not None:
        # First: asking for the companion of an option that is then refused would mislead.
        _refuse_beside_sidecar(config, options)
    for contradiction in CONTRADICTIONS:
        if contradiction.holds(config):
            values = ", ".join(
                f"{name}={options[name].shown(getattr(config, name))}"
                for name in contradiction.names
            )
            raise ConfigError(f"{values}: {contradiction.why}")


def _refuse_beside_sidecar(config: LMCacheEngineConfig, options: Mapping[str, Option]) -> None:
    refused = [
        option
        for name, option in options.items()
        if option.beside_sidecar and getattr(config, name) not in (None, option.default)
    ]
    if refused:
        values = ", ".join(
            f"{option.name}={option.shown(getattr(config, option.name))}" for option in refused
        )
        fixes = "; ".join(dict.fromkeys(option.beside_sidecar for option in refused))
        raise ConfigError(
            f"{values}, sidecar_socket={config.sidecar_socket!r}: the tiers are the sidecar's;"
            f" {fixes}"
        )
