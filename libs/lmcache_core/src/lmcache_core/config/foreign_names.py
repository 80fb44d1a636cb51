"""LMCache's other names in YAML files and variables: accepted if they mean the same or request
nothing, else refused with advice.

There are two generations of names: those before `local_cpu` (`local_device`, `max_local_cache_size`
…) and those after the documented fifteen (`cache_policy`, `use_layerwise` …). Source: the
configuration reference of LMCache's documentation, its definitions and their defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from lmcache_core.config.options import Option, as_directory_url, nearest, problems_of, shown
from lmcache_core.config.registry import EVICTION_POLICIES
from lmcache_core.errors import ConfigError

_Translation = Callable[[Any, Mapping[str, Any]], dict[str, Any] | None]


@dataclass(frozen=True)
class ForeignName:
    """A name of LMCache's that is not one of ours.

    Attributes:
        accepted: Accepted values and what they set, for display.
        translate: Maps the value, and all names with it, to our options; None refuses the value.
        instead: Advice if the value is refused.
        part_of: The name without which LMCache ignores this one, "" for none.
        secret: It may hold a password: of its value only the names of a mapping are shown.
        is_tuning: A refused value asks neither for other KV nor for another place of it, so that a
            migration may leave it out.
    """

    accepted: str
    translate: _Translation
    instead: str
    part_of: str = ""
    secret: bool = False
    is_tuning: bool = False

    def shown(self, value: Any) -> str:
        """Return a value for display."""
        return "…" if self.secret and not isinstance(value, Mapping) else shown(value)


def in_our_names(
    named: Mapping[str, Any], options: Mapping[str, Option], origin: str
) -> dict[str, Any]:
    """Return the options under our names.

    Args:
        named: Values by our names and LMCache's.
        origin: Their source, for errors.

    Raises:
        ConfigError: An option is refused, see `translated`. The text has a line for each.
    """
    values, problems = translated(named, options, origin)
    if problems:  # together with those of our own names, so that one look at the file suffices
        raise ConfigError("\n".join([*problems, *problems_of(values, options)]))
    return values


def translated(
    named: Mapping[str, Any], options: Mapping[str, Option], origin: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the options under our names, and a line for each that is refused: a name is unknown,
    a value of LMCache's requests something that does not exist here, or two names contradict each
    other. Values of our own names are not checked.
    """
    values = {name: value for name, value in named.items() if name in options}
    if "local_disk" in values:
        disk = values["local_disk"]
        values["local_disk"] = None if disk is False else as_directory_url(disk)
    problems: list[str] = []
    are_names_listed = False
    for name, value in named.items():
        if name in options:
            continue
        if name not in FOREIGN_NAMES:
            near = nearest(name, options)
            if not near and not are_names_listed:
                near, are_names_listed = f"; known: {', '.join(options)}", True
            problems.append(f"{origin}: unknown option {shown(name)}{near}")
            continue
        translated = FOREIGN_NAMES[name].translate(value, named)
        if translated is None:
            known = FOREIGN_NAMES[name]
            problems.append(f"{origin}: {name}={known.shown(value)}: {known.instead}")
            continue
        for ours, meant in translated.items():
            if ours in values and values[ours] != meant:
                problems.append(
                    f"{origin}: {name}={shown(value)} means {ours}={shown(meant)}, but that is set"
                    " too; keep one of them"
                )
            values[ours] = meant
    return values, problems


def _local_device(value: Any, _named: Mapping[str, Any]) -> dict[str, Any] | None:
    if value is None or value == "cpu":
        return {"local_cpu": value == "cpu"}
    if isinstance(value, str) and value.startswith(("file:///", "/")):
        return {"local_cpu": False, "local_disk": as_directory_url(value)}
    return None


def _max_local_cache_size(value: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Set the size of the tier that `local_device` names."""
    on_disk = "local_disk" in (_local_device(named.get("local_device", "cpu"), named) or {})
    return {"max_local_disk_size" if on_disk else "max_local_cpu_size": value}


def _cache_policy(value: Any, _named: Mapping[str, Any]) -> dict[str, Any] | None:
    if value is None:
        return {}
    name = value.lower() if isinstance(value, str) else ""
    return {"eviction_policy": name} if name in ("lru", "s3fifo") else None


def _only(instead: str, *defaults: Any, is_tuning: bool = False) -> ForeignName:
    """Return a name whose value is accepted if it requests nothing: LMCache's default, null or
    empty.
    """

    def translate(value: Any, _named: Mapping[str, Any]) -> dict[str, Any] | None:
        is_default = any(  # True is not 1 here
            value == d and isinstance(value, bool) == isinstance(d, bool) for d in defaults
        )
        return {} if is_default or value in _EMPTY else None

    said = [str(d).lower() if isinstance(d, bool) else str(d) for d in defaults]
    accepted = ", ".join([*said, "null, empty"])
    return ForeignName(accepted, translate, instead, is_tuning=is_tuning)


def _part_of(
    switch: str, names: str, instead: str | None = None, *, is_tuning: bool = False
) -> dict[str, ForeignName]:
    """Return the names that LMCache reads only if `switch` is set: any value is accepted if it is
    not.

    Args:
        switch: An option that is refused by itself, or with `instead` also an option here.
        names: The names, separated by spaces.
        instead: Advice if the switch is set. Empty values are then accepted, too.
    """

    def translate(value: Any, named: Mapping[str, Any]) -> dict[str, Any] | None:
        is_off = named.get(switch) in (*_EMPTY, False)
        return {} if is_off or (instead is not None and value in _EMPTY) else None

    accepted = f"anything, while `{switch}` is off or unset"
    fix = f"it belongs to {switch}; leave both out"
    if instead is not None:
        accepted, fix = f"null, empty; {accepted}", f"leave it out; {instead}"
    part = ForeignName(accepted, translate, fix, switch, is_tuning=is_tuning)
    return dict.fromkeys(names.split(), part)


_EMPTY: tuple[Any, ...] = (None, "", [], {})
_NO_PD = (
    "handing KV from a prefill pod to a decode pod directly is not in this release; share it"
    " through peers or the remote tier"
)
*_FIRST_POLICIES, _LAST_POLICY = EVICTION_POLICIES
_NO_OTHER_POLICY = f"set eviction_policy to {', '.join(_FIRST_POLICIES)} or {_LAST_POLICY}"
_NO_GDS = "there is no GPU-direct tier; use local_disk"

FOREIGN_NAMES: Mapping[str, ForeignName] = MappingProxyType(
    {
        "local_device": ForeignName(
            'cpu: `local_cpu: true`; "file:///dir/": `local_cpu: false` and `local_disk`; null:'
            " `local_cpu: false`",
            _local_device,
            'chunks are kept in host memory and on disk; set it to cpu or "file:///dir/"',
        ),
        "max_local_cache_size": ForeignName(
            "`max_local_cpu_size`; `max_local_disk_size` where local_device is a directory",
            _max_local_cache_size,
            "",
        ),
        "cache_policy": ForeignName(
            "LRU, S3FIFO: `eviction_policy` of that name; null", _cache_policy, _NO_OTHER_POLICY
        ),
        "blocking_timeout_secs": ForeignName(
            "`tier_timeout_s`",
            lambda value, _: {} if value is None else {"tier_timeout_s": value},
            "",
        ),
        "pre_caching_hash_algorithm": ForeignName(
            "builtin, sha256…, null: chunks are always named by SHA-256",
            lambda value, _: (
                {}
                if value in (None, "builtin")
                or (isinstance(value, str) and value.startswith("sha256"))
                else None
            ),
            "chunks are always named by SHA-256; leave it out",
        ),
        "pipelined_backend": ForeignName(
            "true, false, null: remote tiers always pipeline",
            lambda value, _: {} if value in (None, True, False) else None,
            "must be one of true, false",
        ),
        "use_layerwise": _only(
            "KV moves by chunk, not by layer; set it to false", False, is_tuning=True
        ),
        "enable_async_loading": _only(
            "use the engine's prefetch; set it to false", False, is_tuning=True
        ),
        "py_enable_gc": _only(
            "the process's garbage collection is left alone; set it to true", True, is_tuning=True
        ),
        "numa_mode": _only(
            "bind the process instead (numactl, the kubelet's topology manager); set it to null",
            is_tuning=True,
        ),
        "local_cpu_use_hugepages": _only(
            "let the system choose (transparent huge pages); set it to false", False, is_tuning=True
        ),
        "reserve_local_cpu_size": _only(
            "set max_local_cpu_size to what there is to use; leave it out", 0
        ),
        "local_disk_path_sharding": _only("there is one directory; leave it out", "by_gpu"),
        "priority_limit": _only("every request is cached; set it to null"),
        "min_retrieve_tokens": _only(
            "set prefill_tokens_per_s: what is slower to load than to compute is not loaded;"
            " leave it out",
            0,
        ),
        "lookup_timeout_ms": _only("set tier_timeout_s, in seconds", 3000),
        "hit_miss_ratio": _only("hits are never pretended; leave it out"),
        "external_lookup_client": _only(
            "use the lookup service (the sidecar's lookup_url); set it to null"
        ),
        "lookup_server_worker_ids": _only(
            "engines run no lookup server; leave it out", is_tuning=True
        ),
        "enable_scheduler_bypass_lookup": _only("set it to false", False, is_tuning=True),
        "retrieve_locations": _only(
            "all tiers are asked, fastest first; name fewer in lookup's search_range"
        ),
        "store_location": _only("chunks go to all tiers; leave out the tiers that you do not want"),
        "extra_config": replace(
            _only(
                "nothing reads it here; see which options there are, and leave it out; a password"
                " of Redis is part of remote_url"
            ),
            secret=True,
        ),
        "pin_timeout_sec": _only(
            "pins end with the connection that holds them; leave it out", 300, is_tuning=True
        ),
        "pin_check_interval_sec": _only(
            "pins end with the connection that holds them; leave it out", 30, is_tuning=True
        ),
        "enable_kv_events": _only(
            "routers learn what a sidecar has by lmcache.kv_events in vLLM; set it to false", False
        ),
        "use_gpu_connector_v3": _only(
            "the GPU connector is an argument of the engine; set it to false", False, is_tuning=True
        ),
        "audit_actual_remote_url": _only("set remote_url; there is no auditing tier"),
        "weka_path": _only(_NO_GDS),
        "mp_host": _only("set sidecar_socket to the socket of the pod's sidecar"),
        **_part_of("mp_host", "mp_port"),
        "enable_lazy_memory_allocator": _only(
            "all memory is allocated at the start, so that it cannot run short later; set"
            " max_local_cpu_size to what there is",
            False,
            is_tuning=True,
        ),
        **_part_of(
            "enable_lazy_memory_allocator",
            "lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio lazy_memory_step_ratio"
            " lazy_memory_safe_size",
            is_tuning=True,
        ),
        **_part_of(
            "enable_blending",
            "blend_separator blend_special_str",
            "give the separator as token ids, CachedCausalLM(model, engine, separator)",
        ),
        **_part_of(
            "enable_blending",
            "blend_add_special_in_precomp",
            "documents are encoded by the caller, with what they begin with",
        ),
        **_part_of(
            "enable_blending",
            "blend_recompute_ratios",
            "set blend_recompute_ratio, one number for all layers",
        ),
        **_part_of(
            "enable_blending",
            "blend_thresholds",
            "a share of the tokens is recomputed (blend_recompute_ratio), not what is above a"
            " bound",
        ),
        **_part_of(
            "enable_blending",
            "blend_check_layers",
            "the layer on which tokens are chosen follows from blend_policy: 1 for deviation,"
            " 0 for the others",
        ),
        **_part_of(
            "enable_p2p",
            "p2p_host p2p_init_ports p2p_lookup_ports peer_init_ports peer_lookup_ports",
            "peers are found by lookup_url and broker_url, and chunks are served at"
            " distributed_url",
        ),
        "enable_controller": _only(
            "there is no controller; use the lookup service and the broker (the sidecar's"
            " lookup_url and broker_url)",
            False,
        ),
        **_part_of(
            "enable_controller",
            "lmcache_instance_id controller_url controller_pull_url controller_reply_url"
            " lmcache_worker_port lmcache_worker_ports lmcache_worker_ids"
            " lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time",
        ),
        "enable_pd": _only(_NO_PD, False),
        "enable_xpyd": _only(_NO_PD, False),
        "enable_nixl": _only(_NO_PD, False),
        **_part_of(
            "enable_pd",
            "pd_role pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port"
            " pd_peer_alloc_port pd_peer_query_port pd_proxy_host pd_proxy_port"
            " pd_allocation_timeout_sec pd_shutdown_timeout_sec pd_max_prefill_len"
            " pd_condition_poll_interval_sec pd_backend_mode pd_skip_proxy_notification"
            " pd_bidirectional transfer_channel nixl_backends",
        ),
        **_part_of(
            "enable_nixl",
            "nixl_role nixl_buffer_size nixl_buffer_device nixl_enable_gc nixl_peer_host"
            " nixl_peer_port nixl_peer_init_port nixl_peer_alloc_port nixl_receiver_host"
            " nixl_receiver_port nixl_proxy_host nixl_proxy_port",
        ),
        "gds_path": _only(_NO_GDS),
        **_part_of(
            "gds_path", "gds_path_sharding gds_buffer_size gds_backend use_gds cufile_buffer_size"
        ),
        "maru_path": _only("there is no CXL tier; use local_disk or remote_url"),
        **_part_of("maru_path", "maru_pool_size"),
        "internal_api_server_enabled": _only(
            "engines open no port; ask the sidecar's REST interface", False, is_tuning=True
        ),
        **_part_of(
            "internal_api_server_enabled",
            "internal_api_server_host internal_api_server_port_start script_allowed_imports"
            " internal_api_server_include_index_list internal_api_server_socket_path_prefix",
            is_tuning=True,
        ),
        **dict.fromkeys(
            [
                *("plugin_locations", "runtime_plugin_locations", "external_backends"),
                *("storage_plugins", "remote_storage_plugins"),
            ],
            _only("nothing is loaded by name from a configuration; leave it out"),
        ),
        "remote_config_url": _only(
            "configuration is read from a file and the environment; leave it out"
        ),
        **_part_of("remote_config_url", "app_id"),
        "enable_chunk_statistics": _only(
            "counters are always kept; set it to false", False, is_tuning=True
        ),
        **_part_of(
            "enable_chunk_statistics",
            "chunk_statistics_auto_start_statistics chunk_statistics_strategy"
            " chunk_statistics_auto_exit_timeout_hours"
            " chunk_statistics_auto_exit_target_unique_chunks",
            is_tuning=True,
        ),
        "enable_hidden_state_cache": _only("only KV is cached; set it to false", False),
        **_part_of(
            "enable_hidden_state_cache",
            "max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode",
        ),
        "cost_aware_half_life_seconds": _only(_NO_OTHER_POLICY, 60),
        "cost_aware_ewma_alpha": _only(_NO_OTHER_POLICY, 0.2),
    }
)
