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
            "Host memory for chunks. Needed with `local_cpu` off too: chunks pass through it."
            " Beside a sidecar unused: its `arena_gb`.",
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
            "Disk space for chunks. A file that names `local_disk` alone gets 5. Without"
            " `local_disk` unused.",
            unit="GB",
            low=0,
            high=1 << 24,
            beside_sidecar="set the sidecar's disk_gb",
        )
    )
    remote_url: str | None = field(
        metadata=about(
            "Remote tier",
            "Where chunks are shared. With nobody listening it costs one refused connection and one"
            " log line, then its breaker opens. From a file or the environment the default is"
            " none.",
            form=REMOTE_URL,
            beside_sidecar="set the sidecar's remote_url",
        )
    )
    remote_serde: str | None = field(
        metadata=about(
            "Remote tier",
            "How chunks are encoded for the remote tier. naive, or none: as they are. lossless:"
            " fewer bytes, the same values. cachegen: several times fewer, with the documented"
            " loss; cachegen:high and cachegen:low: finer and coarser levels of our own. All of"
            " these need lmcache-core[codec]. torch, safetensor, fast: the documented formats, no"
            " smaller. What was stored with loss is a miss for all who did not choose a cachegen.",
            choices=REMOTE_SERDES,
            beside_sidecar="set the sidecar's remote_serde",
        )
    )
    save_decode_cache: bool = field(
        metadata=about(
            "Chunks",
            "Also store the KV of generated tokens, so that the next turn of a conversation finds"
            " the answer too.",
        )
    )
    enable_blending: bool = field(
        metadata=about(
            "Blending",
            "Reuse chunks that are not a prefix, for a model with a certificate in"
            " `blend_certificates`. For Hugging Face transformers: vLLM loads prefixes only.",
        )
    )
    blend_recompute_ratio: float = field(
        metadata=about(
            "Blending",
            "Share of the reused tokens that are computed anew, as `blend_policy` selects them.",
            low=0,
            high=1,
        )
    )
    blend_min_tokens: int = field(
        metadata=about(
            "Blending",
            "Shortest prompt that is blended; shorter ones are computed.",
            unit="tokens",
            low=0,
            high=(1 << 31) - 1,
        )
    )
    enable_p2p: bool = field(
        metadata=about(
            "Peers",
            "Ask peers for chunks, and serve them. For an engine without a sidecar; needs"
            " `lookup_url`, `broker_url`, `distributed_url`.",
            beside_sidecar=_PEERS_ARE_THE_SIDECARS,
        )
    )
    lookup_url: str | None = field(
        metadata=about(
            "Peers",
            "The lookup service, `http://host:port` or `https://host:port`. Unused without"
            " `enable_p2p`.",
            form=NON_EMPTY,
        )
    )
    distributed_url: str | None = field(
        metadata=about(
            "Peers",
            "Where this engine serves its chunks to peers, `lm+tls://host:port` or, unencrypted,"
            " `lm://host:port`; it listens there. Unused without `enable_p2p`.",
            form=NON_EMPTY,
        )
    )
    error_handling: bool = field(
        metadata=about(
            "Time and failures",
            "True: whatever goes wrong inside the cache while the engine calls it is logged,"
            " counted and answered as a miss. False: it is raised. Wrong arguments raise ValueError"
            " in either case.",
        )
    )
