"""The engine's configuration. Its fields are the table of options: types, defaults, units, checks
and meanings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from lmcache_core.config import sources
from lmcache_core.config.contradictions import refuse_contradictions
from lmcache_core.config.options import (
    BLEND_POLICIES,
    DIRECTORY_URL,
    DISK_SERDES,
    REMOTE_SERDES,
    REMOTE_URL,
    SOCKET_PATH,
    UTF8,
    VERIFY_HOT_MODES,
    as_directory_url,
    did_you_mean,
    option,
    options_of,
    problems_of,
)
from lmcache_core.config.registry import DEFAULT_EVICTION_POLICY, EVICTION_POLICIES
from lmcache_core.errors import ConfigError

_TEN_YEARS_S = 10 * 365 * 86400


@dataclass(frozen=True, repr=False)
class LMCacheEngineConfig:
    """Options of an `LMCacheEngine`; sizes are in GB (2^30 bytes). Their meanings are given with
    the fields, and in docs/configuration.md.

    The first fifteen are the documented ones, with their defaults in `from_defaults`. The others
    are this library's own.

    Raises:
        ConfigError: Values are invalid, one line for each, or contradict one another.
    """

    chunk_size: int = option(
        "Chunks",
        "Tokens in a chunk, the unit that is hashed, stored and found.",
        unit="tokens",
        limits=(1, 65536),
    )
    local_cpu: bool = option(
        "Host memory",
        "Keep chunks in host memory.",
        beside_sidecar="leave it true, the sidecar keeps chunks in its memory",
    )
    max_local_cpu_size: float = option(
        "Host memory",
        "Host memory for chunks; needed with `local_cpu` off too, since chunks pass through it. "
        "Ignored with a sidecar.",
        unit="GB",
        limits=(0, 1 << 20),
    )
    local_disk: str | None = option(
        "Disk", "Directory for chunks.", form=DIRECTORY_URL, sidecar="disk_path and disk_gb"
    )
    max_local_disk_size: float = option(
        "Disk",
        "Disk space for chunks; 5 in a file that sets only `local_disk`.",
        unit="GB",
        limits=(0, 1 << 24),
        sidecar="disk_gb",
    )
    remote_url: str | None = option(
        "Remote tier",
        "Where chunks are shared. From a file or the environment the default is none. If nothing "
        "listens, it costs one refused connection and one log line until the breaker retries.",
        form=REMOTE_URL,
        sidecar="remote_url",
    )
    remote_serde: str | None = option(
        "Remote tier",
        "Encoding in the remote tier. lossless: smaller, exact. cachegen: several times smaller, "
        "with the documented loss; cachegen:high and cachegen:low: finer and coarser. All three "
        "need the extra `codec` of lmcache-core. Chunks that were stored with loss are misses for "
        "a reader without a cachegen serde. torch, safetensor, fast: the engine's alone, no "
        "smaller.",
        choices=REMOTE_SERDES,
        sidecar="remote_serde",
    )
    save_decode_cache: bool = option(
        "Chunks", "Also store generated tokens, for the next turn of a conversation."
    )
    enable_blending: bool = option(
        "Blending",
        "Reuse chunks that are not a prefix, for models with a passed certificate. Not in vLLM.",
    )
    blend_recompute_ratio: float = option(
        "Blending", "Share of reused tokens to recompute.", limits=(0, 1)
    )
    blend_min_tokens: int = option(
        "Blending", "Shorter prompts are not blended.", unit="tokens", limits=(0, (1 << 31) - 1)
    )
    enable_p2p: bool = option(
        "Peers",
        "Pull from peers and serve them, without a sidecar. Needs `lookup_url`, `broker_url`, "
        "`distributed_url`.",
        beside_sidecar="leave it out, peers are found and served by the sidecar, by its settings"
        " lookup_url, broker_url and distributed_url",
    )
    lookup_url: str | None = option(
        "Peers",
        "Lookup service, `http://host:port` or `https://host:port`; none: chunks of others are not "
        "found.",
    )
    distributed_url: str | None = option(
        "Peers",
        "Where this engine listens for peers, `lm+tls://host:port` or `lm://host:port` "
        "(plaintext).",
    )
    error_handling: bool = option(
        "Time and failures",
        "True: errors inside the cache are logged, counted and answered as a miss. False: they "
        "are raised. Wrong arguments always raise ValueError.",
    )

    _: KW_ONLY
    broker_url: str | None = option(
        "Peers",
        "Broker, `http://host:port` or `https://host:port`; none: other instances are not known.",
        default=None,
        sidecar="broker_url",
    )
    peer_token_file: str | None = option(
        "Peers",
        "Bearer token file for lookup and broker. Re-read when it changes.",
        default=None,
        sidecar="service_token_file",
    )
    peer_ticket_keys_file: str | None = option(
        "Peers",
        "The broker's ticket keys, one `id:base64` per line; peers then need tickets.",
        default=None,
        sidecar="ticket_keys_file",
    )
    peer_tls_cert_file: str | None = option(
        "Peers",
        "Certificate (PEM) for peers at an lm+tls `distributed_url`, and as a client. All "
        "`peer_tls` files are re-read when they change.",
        default=None,
        sidecar="tls_cert_file and tls_client_cert_file",
    )
    peer_tls_key_file: str | None = option(
        "Peers",
        "Key (PEM, no passphrase), if not in `peer_tls_cert_file`.",
        default=None,
        sidecar="tls_key_file and tls_client_key_file",
    )
    peer_tls_ca_file: str | None = option(
        "Peers",
        "CA (PEM) for lookup, broker and peers; none: the system's.",
        default=None,
        sidecar="tls_ca_file",
    )
    peer_tls_client_ca_file: str | None = option(
        "Peers",
        "CA (PEM) of client certificates that peers must show; none: no client certificates.",
        default=None,
        sidecar="tls_client_ca_file",
    )
    peer_tls_name: str | None = option(
        "Peers",
        "Name in peers' certificates, if not their host.",
        default=None,
        sidecar="tls_peer_name",
    )
    peer_allow_plaintext: bool = option(
        "Peers",
        "Allow an lm `distributed_url` that other machines reach, on a trusted or encrypted "
        "network.",
        default=False,
        sidecar="allow_plaintext",
    )

    blend_policy: str = option(
        "Blending",
        "Which reused tokens are recomputed. deviation: those whose KV differs most on an early "
        "layer (CacheBlend). first_of_chunk: each text's first (EPIC).",
        default="deviation",
        choices=BLEND_POLICIES,
    )
    blend_certificates: str | None = option(
        "Blending", "Folder written by `python -m lmcache_core.blend.certify`.", default=None
    )

    sidecar_socket: str | None = option(
        "Sidecar",
        "Unix socket of the pod's sidecar, whose tiers replace the engine's own.",
        default=None,
        form=SOCKET_PATH,
    )
    verify_hot: str = option(
        "Host memory",
        "Digests checked on loads from host memory: each, 1 in 16, or none. Chunks from elsewhere "
        "are always checked.",
        default="always",
        choices=VERIFY_HOT_MODES,
        sidecar="verify_hot",
    )
    tier_timeout_s: float = option(
        "Time and failures",
        "Longest wait on a tier or the sidecar.",
        default=2.0,
        unit="seconds",
        limits=(0.001, 3600),
    )
    salt: str = option(
        "Chunks",
        "Part of every chunk's hash: other salts never find these chunks. A secret.",
        default="",
        form=UTF8,
        secret=True,
        sidecar="salt_file",
    )
    eviction_policy: str = option(
        "Host memory",
        "Which chunks are evicted first.",
        default=DEFAULT_EVICTION_POLICY,
        choices=tuple(EVICTION_POLICIES),
        beside_sidecar="leave it out, the sidecar decides what its memory keeps",
    )
    chunk_ttl_s: float | None = option(
        "Chunks",
        "How long a chunk is served after it was stored here, restarts included; none: no limit.",
        default=None,
        unit="seconds",
        limits=(0.001, _TEN_YEARS_S),
        beside_sidecar="leave it out, the sidecar decides how long it keeps chunks",
    )
    prefill_tokens_per_s: float | None = option(
        "Time and failures",
        "Prefill speed; none: learned. Sets each retrieve's deadline, at most `tier_timeout_s`.",
        default=None,
        unit="tokens per second",
        limits=(0.001, 10**9),
    )
    close_drain_s: float = option(
        "Time and failures",
        "How long closing waits for pending writes.",
        default=5.0,
        unit="seconds",
        limits=(0, 3600),
    )
    disk_fsync: bool = option(
        "Disk",
        "Sync each chunk. Without it a power cut may lose the newest chunks, never damage any.",
        default=False,
        sidecar="disk_fsync",
    )
    remote_token_file: str | None = option(
        "Remote tier",
        "Bearer token file for lm and lm+tls. Re-read when it changes.",
        default=None,
        sidecar="service_token_file",
    )
    save_unfull_chunk: bool = option(
        "Chunks", "Also store a prompt's last, shorter chunk.", default=True
    )
    local_disk_serde: str = option(
        "Disk",
        "Encoding on disk; see `remote_serde`.",
        default="naive",
        choices=DISK_SERDES,
        sidecar="disk_serde",
    )
    remote_tls_ca_file: str | None = option(
        "Remote tier",
        "CA (PEM) for lm+tls; none: the system's.",
        default=None,
        sidecar="tls_ca_file",
    )
    remote_tls_cert_file: str | None = option(
        "Remote tier",
        "Client certificate (PEM), with its key or `remote_tls_key_file`.",
        default=None,
        sidecar="tls_client_cert_file",
    )
    remote_tls_key_file: str | None = option(
        "Remote tier",
        "Key (PEM, no passphrase) of `remote_tls_cert_file`.",
        default=None,
        sidecar="tls_client_key_file",
    )
    otlp_endpoint: str | None = option(
        "Time and failures",
        "Trace collector, OTLP over HTTP, `http://host:4318`; none: no traces.",
        default=None,
    )
    trace_sample_ratio: float = option(
        "Time and failures",
        "Share of the requests that begin here and are traced; those of traced callers always are.",
        default=0.01,
        limits=(0, 1),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "local_disk", as_directory_url(self.local_disk))
        if problems := problems_of({name: getattr(self, name) for name in OPTIONS}, OPTIONS):
            raise ConfigError("\n".join(problems))
        refuse_contradictions(self, OPTIONS)

    def __repr__(self) -> str:
        values = (f"{name}={OPTIONS[name].shown(getattr(self, name))}" for name in OPTIONS)
        return f"{type(self).__name__}({', '.join(values)})"

    @staticmethod
    def from_defaults(
        chunk_size: int = 256,
        local_cpu: bool = True,
        max_local_cpu_size: float = 5.0,
        local_disk: str | None = None,
        max_local_disk_size: float = 0,
        remote_url: str | None = "lm://localhost:65432",
        remote_serde: str | None = "naive",
        save_decode_cache: bool = False,
        enable_blending: bool = False,
        blend_recompute_ratio: float = 0.15,
        blend_min_tokens: int = 256,
        enable_p2p: bool = False,
        lookup_url: str | None = None,
        distributed_url: str | None = None,
        error_handling: bool = False,
        **options: Any,
    ) -> LMCacheEngineConfig:
        """Return the documented defaults; `options` are further attributes of this class.

        Raises:
            ConfigError: An option is unknown, its value invalid, or it contradicts another.
        """
        return _build(_flat(locals()), "from_defaults")

    @staticmethod
    def from_legacy(
        chunk_size: int = 256,
        backend: str = "cpu",
        remote_url: str | None = "lm://localhost:65432",
        remote_serde: str | None = "naive",
        save_decode_cache: bool = False,
        enable_blending: bool = False,
        blend_recompute_ratio: float = 0.15,
        blend_min_tokens: int = 256,
        max_local_disk_size: float = 0.0,
        enable_p2p: bool = False,
        lookup_url: str | None = None,
        distributed_url: str | None = None,
        error_handling: bool = False,
        **options: Any,
    ) -> LMCacheEngineConfig:
        """Return a config for one of the documented backend names (`cpu`, `local_disk`, `remote`,
        `local_cpu_disk_remote` …).

        Args other than `backend` are attributes of this class; the backend selects the tiers. A
        disk has 5 GB unless `max_local_disk_size` is given.

        Raises:
            ConfigError: The backend or an option is unknown, or an option contradicts the backend.
        """
        values = _flat(locals())
        del values["backend"]
        from lmcache_core.config.legacy_backends import tiers_of

        return _build(values | tiers_of(backend, values), "from_legacy")

    @staticmethod
    def from_file(file_path: str) -> LMCacheEngineConfig:
        """Return a config from a YAML file; omitted names have their defaults, and there is no
        remote tier by default.

        LMCache's own names are accepted where they mean the same (docs/configuration.md).

        Raises:
            ConfigError: The file cannot be read, is not a mapping, or an option in it is wrong.
        """
        return _build(sources.values_of_file(file_path, OPTIONS), file_path)

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None) -> LMCacheEngineConfig:
        """Return the defaults without a remote tier, overridden by the file that
        `LMCACHE_CONFIG_FILE` names, overridden by `LMCACHE_<OPTION>`.

        Args:
            environ: Instead of the process's environment.

        Raises:
            ConfigError: A variable with our prefix names no option, its value cannot be read, or
                `from_file` would refuse the file.
        """
        variables = sources.read_environment(environ)
        path = variables.get(sources.CONFIG_FILE_ENV)
        values = sources.values_of_file(path, OPTIONS) if path else {"remote_url": None}
        return _build(values | sources.values_of_environment(variables, OPTIONS), "environment")


OPTIONS = options_of(LMCacheEngineConfig, LMCacheEngineConfig.from_defaults)


def _flat(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function, including those in its `**options`."""
    return {
        **{name: value for name, value in arguments.items() if name != "options"},
        **arguments["options"],
    }


def _build(values: Mapping[str, Any], origin: str) -> LMCacheEngineConfig:
    unknown = [
        f"{origin}: unknown option {name!r}{did_you_mean(str(name), OPTIONS)}"
        for name in values
        if name not in OPTIONS
    ]
    if unknown:
        raise ConfigError("\n".join(unknown))
    return LMCacheEngineConfig(
        **{name: values.get(name, option.default) for name, option in OPTIONS.items()}
    )
