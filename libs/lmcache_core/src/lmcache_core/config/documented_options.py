"""The documented options of the engine: types, units, checks and meanings. Their defaults are
those of `from_defaults`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_core.config.options import DIRECTORY_URL, NON_EMPTY, REMOTE_SERDES, REMOTE_URL, about

_PEERS_ARE_THE_SIDECARS = (
    "leave it out, peers are found and served by the sidecar, by its settings lookup_url,"
    " broker_url and distributed_url"
)


@dataclass(frozen=True, repr=False)
class DocumentedOptions:
    """The documented fifteen, in their order."""

    chunk_size: int = field(
        metadata=about(
            "Chunks",
            "Tokens in a chunk, the unit that is hashed, stored and found.",
            unit="tokens",
            low=1,
            high=65536,
        )
    )
    local_cpu: bool = field(
        metadata=about(
            "Host memory",
            "Keep chunks in host memory.",
            beside_sidecar="leave it true, the sidecar keeps chunks in its memory",
        )
    )
    max_local_cpu_size: float = field(
        metadata=about(
            "Host memory",
            "Host memory for chunks; needed with `local_cpu` off too, since chunks pass "
            "through it. Ignored with a sidecar.",
            unit="GB",
            low=0,
            high=1 << 20,
        )
    )
    local_disk: str | None = field(
        metadata=about(
            "Disk",
            "Directory for chunks.",
            form=DIRECTORY_URL,
            beside_sidecar="set the sidecar's disk_path and disk_gb",
        )
    )
    max_local_disk_size: float = field(
        metadata=about(
            "Disk",
            "Disk space for chunks; 5 in a file that sets only `local_disk`.",
            unit="GB",
            low=0,
            high=1 << 24,
            beside_sidecar="set the sidecar's disk_gb",
        )
    )
    remote_url: str | None = field(
        metadata=about(
            "Remote tier",
            "Where chunks are shared. From a file or the environment the default is none. "
            "If nothing listens, it costs one refused connection and one log line until "
            "the breaker retries.",
            form=REMOTE_URL,
            beside_sidecar="set the sidecar's remote_url",
        )
    )
    remote_serde: str | None = field(
        metadata=about(
            "Remote tier",
            "Encoding in the remote tier. lossless: smaller, exact. cachegen: several "
            "times smaller, with the documented loss; cachegen:high and cachegen:low: "
            "finer and coarser. These need lmcache-core[codec]. torch, safetensor, fast: "
            "documented formats, no smaller. Lossy chunks are misses for readers without a "
            "cachegen serde.",
            choices=REMOTE_SERDES,
            beside_sidecar="set the sidecar's remote_serde",
        )
    )
    save_decode_cache: bool = field(
        metadata=about(
            "Chunks",
            "Also store generated tokens, for the next turn of a conversation.",
        )
    )
    enable_blending: bool = field(
        metadata=about(
            "Blending",
            "Reuse chunks that are not a prefix, for models with a passed certificate. Not "
            "in vLLM.",
        )
    )
    blend_recompute_ratio: float = field(
        metadata=about(
            "Blending",
            "Share of reused tokens to recompute.",
            low=0,
            high=1,
        )
    )
    blend_min_tokens: int = field(
        metadata=about(
            "Blending",
            "Shorter prompts are not blended.",
            unit="tokens",
            low=0,
            high=(1 << 31) - 1,
        )
    )
    enable_p2p: bool = field(
        metadata=about(
            "Peers",
            "Pull from peers and serve them, without a sidecar. Needs `lookup_url`, "
            "`broker_url`, `distributed_url`.",
            beside_sidecar=_PEERS_ARE_THE_SIDECARS,
        )
    )
    lookup_url: str | None = field(
        metadata=about(
            "Peers",
            "Lookup service, `http://host:port` or `https://host:port`.",
            form=NON_EMPTY,
        )
    )
    distributed_url: str | None = field(
        metadata=about(
            "Peers",
            "Where this engine listens for peers, `lm+tls://host:port` or `lm://host:port` "
            "(plaintext).",
            form=NON_EMPTY,
        )
    )
    error_handling: bool = field(
        metadata=about(
            "Time and failures",
            "True: errors inside the cache are logged, counted and answered as a miss. "
            "False: they are raised. Wrong arguments always raise ValueError.",
        )
    )
