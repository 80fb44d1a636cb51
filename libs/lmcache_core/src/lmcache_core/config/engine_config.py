"""The engine's configuration. Its fields are the one table of options: types, defaults, units,
checks and meanings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from lmcache_core.config import sources
from lmcache_core.config.blend_options import BlendOptions
from lmcache_core.config.contradictions import refuse_contradictions
from lmcache_core.config.documented_options import DocumentedOptions
from lmcache_core.config.options import (
    DISK_SERDES,
    EVICTION_POLICIES,
    NON_EMPTY,
    SOCKET_PATH,
    UTF8,
    VERIFY_HOT_MODES,
    about,
    as_directory_url,
    did_you_mean,
    options_of,
    problems_of,
)
from lmcache_core.config.peer_options import PeerOptions
from lmcache_core.errors import ConfigError

_TEN_YEARS_S = 10 * 365 * 86400


@dataclass(frozen=True, repr=False)
class LMCacheEngineConfig(BlendOptions, PeerOptions, DocumentedOptions):
    """Options of an `LMCacheEngine`; sizes are in GB (2^30 bytes). Each one's meaning stands with
    it, and in docs/configuration.md.

    The first fifteen are the documented ones, with their defaults in `from_defaults`. The others
    are this library's own.

    Raises:
        ConfigError: Values are impossible, a line for each, or contradict one another.
    """

    _: KW_ONLY
    sidecar_socket: str | None = field(
        default=None,
        metadata=about(
            "Sidecar",
            "Unix socket of the pod's sidecar, whose tiers replace the engine's own.",
            form=SOCKET_PATH,
        ),
    )
    verify_hot: str = field(
        default="always",
        metadata=about(
            "Host memory",
            "Check digests of chunks loaded from host memory: each, 1 in 16, or none. "
            "Chunks from elsewhere are always checked.",
            choices=VERIFY_HOT_MODES,
            beside_sidecar="set the sidecar's verify_hot",
        ),
    )
    tier_timeout_s: float = field(
        default=2.0,
        metadata=about(
            "Time and failures",
            "Longest wait on a tier or the sidecar.",
            unit="seconds",
            low=0.001,
            high=3600,
        ),
    )
    salt: str = field(
        default="",
        metadata=about(
            "Chunks",
            "Part of every chunk's hash: other salts never find these chunks. A secret.",
            form=UTF8,
            secret=True,
            beside_sidecar="set the sidecar's salt_file",
        ),
    )
    eviction_policy: str = field(
        default="s3lru",
        metadata=about(
            "Host memory",
            "Which chunks are evicted first.",
            choices=EVICTION_POLICIES,
            beside_sidecar="leave it out, the sidecar decides what its memory keeps",
        ),
    )
    chunk_ttl_s: float | None = field(
        default=None,
        metadata=about(
            "Chunks",
            "How long a chunk is served after it was stored; none: no limit.",
            unit="seconds",
            low=0.001,
            high=_TEN_YEARS_S,
            beside_sidecar="leave it out, the sidecar decides how long it keeps chunks",
        ),
    )
    prefill_tokens_per_s: float | None = field(
        default=None,
        metadata=about(
            "Time and failures",
            "Prefill speed; none: learned. Sets each retrieve's deadline, at most "
            "`tier_timeout_s`.",
            unit="tokens per second",
            low=0.001,
            high=10**9,
        ),
    )
    close_drain_s: float = field(
        default=5.0,
        metadata=about(
            "Time and failures",
            "How long closing waits for pending writes.",
            unit="seconds",
            low=0,
            high=3600,
        ),
    )
    disk_fsync: bool = field(
        default=False,
        metadata=about(
            "Disk",
            "Sync each chunk. Without it a power cut may lose the newest chunks, never damage any.",
            beside_sidecar="set the sidecar's disk_fsync",
        ),
    )
    remote_token_file: str | None = field(
        default=None,
        metadata=about(
            "Remote tier",
            "Bearer token file for lm, lm+tls, http and https. Re-read when it changes.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's service_token_file",
        ),
    )
    save_unfull_chunk: bool = field(
        default=True,
        metadata=about("Chunks", "Also store a prompt's last, shorter chunk."),
    )
    local_disk_serde: str = field(
        default="naive",
        metadata=about(
            "Disk",
            "Encoding on disk; see `remote_serde`.",
            choices=DISK_SERDES,
            beside_sidecar="set the sidecar's disk_serde",
        ),
    )
    remote_tls_ca_file: str | None = field(
        default=None,
        metadata=about(
            "Remote tier",
            "CA (PEM) for lm+tls and https; none: the system's.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's tls_ca_file",
        ),
    )
    remote_tls_cert_file: str | None = field(
        default=None,
        metadata=about(
            "Remote tier",
            "Client certificate (PEM), with its key or `remote_tls_key_file`.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's tls_client_cert_file",
        ),
    )
    remote_tls_key_file: str | None = field(
        default=None,
        metadata=about(
            "Remote tier",
            "Key (PEM, no passphrase) of `remote_tls_cert_file`.",
            form=NON_EMPTY,
            beside_sidecar="set the sidecar's tls_client_key_file",
        ),
    )

    otlp_endpoint: str | None = field(
        default=None,
        metadata=about(
            "Time and failures",
            "Trace collector, OTLP over HTTP, `http://host:4318`; none: no traces.",
            form=NON_EMPTY,
        ),
    )
    trace_sample_ratio: float = field(
        default=0.01,
        metadata=about("Time and failures", "Share of calls that are traced.", high=1),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "local_disk", as_directory_url(self.local_disk))
        if problems := problems_of({name: getattr(self, name) for name in OPTIONS}, OPTIONS):
            raise ConfigError("\n".join(problems))
        refuse_contradictions(self, OPTIONS)

    def __repr__(self) -> str:
        values = ", ".join(
            f"{name}={option.shown(getattr(self, name))}" for name, option in OPTIONS.items()
        )
        return f"{type(self).__name__}({values})"

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
        """The documented defaults; `options` are further attributes of this class.

        Raises:
            ConfigError: An option is unknown, its value impossible, or it contradicts another.
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
        """A config from one of the documented backend names (`cpu`, `local_disk`, `remote`,
        `local_cpu_disk_remote` …).

        Args other than `backend` are attributes of this class; the backend decides which tiers
        there are. A disk has 5 GB unless `max_local_disk_size` says more or less.

        Raises:
            ConfigError: The backend or an option is unknown, or an option contradicts the backend.
        """
        values = _flat(locals())
        del values["backend"]
        from lmcache_core.documented.legacy_config import tiers_of

        return _build(values | tiers_of(backend, values), "from_legacy")

    @staticmethod
    def from_file(file_path: str) -> LMCacheEngineConfig:
        """A config from a YAML file; names that it leaves out have their default, and no remote
        tier.

        LMCache's own names are accepted where they mean the same (docs/configuration.md).

        Raises:
            ConfigError: The file cannot be read, is not a mapping, or an option in it is wrong.
        """
        return _build(sources.values_of_file(file_path, OPTIONS), file_path)

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None) -> LMCacheEngineConfig:
        """Defaults without a remote tier, overridden by the file that `LMCACHE_CONFIG_FILE` names,
        overridden by `LMCACHE_<OPTION>`.

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
    """The arguments of a function, those in its `**options` among them."""
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
