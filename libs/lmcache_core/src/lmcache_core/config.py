"""The engine's configuration and the description of what KV it handles.

No torch at run time: dtypes may be `torch.dtype` objects or their names.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

from lmcache_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

ENV_PREFIX = "LMCACHE_"
SERVICE_ENV_PREFIXES = tuple(f"{ENV_PREFIX}{name}_" for name in ("STORAGE", "LOOKUP", "BROKER", "SIDECAR", "CTL", "DEMO"))
CONFIG_FILE_ENV = "LMCACHE_CONFIG_FILE"
REMOTE_SCHEMES = ("lm", "redis", "rediss", "redis-sentinel", "http", "https", "file")
REMOTE_SERDES = ("naive", "torch", "safetensor", "fast", "cachegen")
VERIFY_HOT_MODES = ("always", "sampled", "never")
LEGACY_BACKENDS = ("cpu", "local_disk", "local_cpu_disk", "remote", "local_cpu_remote", "local_disk_remote", "local_cpu_disk_remote")
DEFAULT_DISK_PATH = "file:///var/lib/lmcache/disk"
DEFAULT_DISK_GB = 5.0
_OTHER_ENV_NAMES = frozenset({CONFIG_FILE_ENV, "LMCACHE_USE_EXPERIMENTAL", "LMCACHE_LOG_LEVEL", "LMCACHE_TRACK_USAGE"})
# What Kubernetes adds for a service `lmcache-vllm`, or any whose name begins so: LMCACHE_VLLM_SERVICE_HOST, LMCACHE_VLLM_PORT=tcp://…
_LINK_NAME = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True)
class LMCacheEngineConfig:
    """Options of an `LMCacheEngine`; sizes are in GB (2^30 bytes). The first fifteen are the documented ones, in their order.

    Attributes:
        chunk_size: Tokens in a chunk.
        local_cpu: Keep chunks in host memory.
        max_local_cpu_size: Host memory for chunks, GB.
        local_disk: Directory for chunks as `file:///dir/`, or None.
        max_local_disk_size: Disk space for chunks, GB.
        remote_url: Remote tier, or None.
        remote_serde: How chunks are encoded for the remote tier.
        save_decode_cache: Also store KV of generated tokens.
        enable_blending: Reuse chunks that are not a prefix.
        blend_recompute_ratio: Share of tokens that blending recomputes.
        blend_min_tokens: Shortest prompt that is blended.
        enable_p2p: Fetch from, and serve, peers: the sidecar's task; without one it has no effect.
        lookup_url: The lookup service, for `enable_p2p`.
        distributed_url: Where peers reach this instance, for `enable_p2p`.
        error_handling: No effect: a tier that fails is a miss in any case, and wrong use raises in any case.
        sidecar_socket: Unix socket of the pod's sidecar; the engine then owns no tier itself.
        verify_hot: Check the digest on a load from host memory: always, sampled (1 in 16) or never.
        tier_timeout_s: Longest wait on any tier, seconds.
        salt: Second line between tenants in embedded mode; part of every chunk hash.
    """

    chunk_size: int
    local_cpu: bool
    max_local_cpu_size: float
    local_disk: str | None
    max_local_disk_size: float
    remote_url: str | None
    remote_serde: str | None
    save_decode_cache: bool
    enable_blending: bool
    blend_recompute_ratio: float
    blend_min_tokens: int
    enable_p2p: bool
    lookup_url: str | None
    distributed_url: str | None
    error_handling: bool
    sidecar_socket: str | None = None
    verify_hot: str = "always"
    tier_timeout_s: float = 2.0
    salt: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for name, holds, wanted in _CHECKS:
            value = getattr(self, name)
            if not holds(value):
                raise ConfigError(f"{name}={_shown(name, value)}: must be {wanted}")
        if self.local_disk is not None and self.max_local_disk_size <= 0:
            raise ConfigError(f"local_disk={self.local_disk!r} needs max_local_disk_size > 0 (GB); it is {self.max_local_disk_size}")
        if self.enable_blending:
            raise ConfigError("enable_blending=True: blending is not available in this release; set it to False")
        if self.sidecar_socket is not None and self.salt:
            raise ConfigError("salt and sidecar_socket: the sidecar hands out the salt of its tenant; set it there (salt_file), not here")

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
            ConfigError: An option is unknown or its value impossible.
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
        """A config from one of the documented backend names (`cpu`, `local_disk`, `remote`, `local_cpu_disk_remote` …).

        Args other than `backend` are attributes of this class; the backend decides which tiers there are.

        Raises:
            ConfigError: The backend or an option is unknown, or an option contradicts the backend.
        """
        values = _flat(locals())
        del values["backend"]
        if backend not in LEGACY_BACKENDS:
            raise ConfigError(f"backend={backend!r}: must be one of {', '.join(LEGACY_BACKENDS)}")
        for name in ("local_cpu", "local_disk"):
            if name in options:
                raise ConfigError(f"{name}={options[name]!r}: decided by backend={backend!r}; leave it out or use from_defaults")
        uses_disk = "disk" in backend
        values["local_cpu"] = "cpu" in backend
        values["local_disk"] = DEFAULT_DISK_PATH if uses_disk else None
        values["max_local_disk_size"] = max_local_disk_size or (DEFAULT_DISK_GB if uses_disk else 0.0)
        values["remote_url"] = remote_url if "remote" in backend else None
        return _build({**_DEFAULTS, **values}, "from_legacy")

    @staticmethod
    def from_file(file_path: str) -> LMCacheEngineConfig:
        """A config from a YAML file; names that it leaves out have their default, and no remote tier.

        Raises:
            ConfigError: The file cannot be read, is not a mapping, or an option in it is wrong.
        """
        try:
            data = yaml.safe_load(Path(file_path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
            raise ConfigError(f"{file_path}: cannot be read as YAML: {exc}") from exc
        if data is None:
            data = {}
        if not isinstance(data, dict):
            raise ConfigError(f"{file_path}: must hold a mapping of options, not {type(data).__name__}")
        values = {**_DEFAULTS, "remote_url": None, **data}
        if values["local_disk"] and "max_local_disk_size" not in data:
            values["max_local_disk_size"] = DEFAULT_DISK_GB
        return _build(values, file_path)

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None) -> LMCacheEngineConfig:
        """Defaults without a remote tier, overwritten by `LMCACHE_<OPTION>` variables (or the file that `LMCACHE_CONFIG_FILE` names).

        Raises:
            ConfigError: A variable with our prefix names no option, or its value cannot be read.
        """
        source = os.environ if environ is None else environ
        if CONFIG_FILE_ENV in source:
            return LMCacheEngineConfig.from_file(source[CONFIG_FILE_ENV])
        values = {**_DEFAULTS, "remote_url": None}
        for variable, text in source.items():
            option = _option_of(variable, text)
            if option is not None:
                values[option] = _parse(option, text)
        return _build(values, "environment")


@dataclass(frozen=True)
class LMCacheEngineMetadata:
    """What the KV is. The first six are the documented fields; the others are part of the identity too.

    Attributes:
        model_name: Model, as the serving engine names it.
        world_size: Number of workers.
        worker_id: This worker.
        fmt: KV format of the serving engine, "vllm" or "huggingface".
        kv_dtype: `torch.dtype` or its name.
        kv_shape: `(num_layers, 2, chunk_size, num_kv_heads, head_size)`.
        revision: Revision of the weights.
        adapter: Name and revision of the LoRA adapter, "" for none.
        layout: Physical layout where it is more than `kv_shape` says.
    """

    model_name: str
    world_size: int
    worker_id: int
    fmt: str
    kv_dtype: torch.dtype | str
    kv_shape: tuple[int, int, int, int, int]
    revision: str = ""
    adapter: str = ""
    layout: str = ""

    @property
    def kv_dtype_name(self) -> str:
        """Name of the KV dtype without a module, for example "bfloat16"."""
        return str(self.kv_dtype).removeprefix("torch.")

    def layout_fingerprint(self) -> str:
        """Text that differs whenever the bytes of a chunk mean something else: sides, layers, heads, head size, layout."""
        layers, sides, _, heads, head_size = self.kv_shape
        return f"KV_BLOB/1;layers={layers};sides={sides};heads={heads};head_size={head_size};{self.layout}"


_OptionCheck = tuple[str, Callable[[Any], bool], str]


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _shown(name: str, value: Any) -> str:
    """A value as an error may show it: without salt and passwords."""
    return "…" if name == "salt" else re.sub(r"//[^/]*@", "//…@", repr(value))


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_remote(value: Any) -> bool:
    if not isinstance(value, str):
        return value is None
    try:
        return urlsplit(value).scheme in REMOTE_SCHEMES
    except ValueError:
        return False


_BOOLEANS = ("local_cpu", "save_decode_cache", "enable_blending", "enable_p2p", "error_handling")
_CHECKS: tuple[_OptionCheck, ...] = (
    ("chunk_size", lambda v: _is_number(v, 1, 65536) and isinstance(v, int), "a whole number of tokens in 1 … 65536"),
    ("max_local_cpu_size", lambda v: _is_number(v, 0, 1 << 20), "a size in GB, 0 or more"),
    ("max_local_disk_size", lambda v: _is_number(v, 0, 1 << 24), "a size in GB, 0 or more"),
    ("local_disk", lambda v: v is None or (isinstance(v, str) and v.startswith("file:///")), "a directory as file:///dir/, or None"),
    ("remote_url", _is_remote, f"a URL with one of the schemes {', '.join(REMOTE_SCHEMES)}, or None"),
    ("remote_serde", lambda v: v is None or v in REMOTE_SERDES, f"one of {', '.join(REMOTE_SERDES)}"),
    ("blend_recompute_ratio", lambda v: _is_number(v, 0, 1), "a share in 0 … 1"),
    ("blend_min_tokens", lambda v: _is_number(v, 0, 1 << 31) and isinstance(v, int), "a whole number of tokens, 0 or more"),
    ("verify_hot", lambda v: v in VERIFY_HOT_MODES, f"one of {', '.join(VERIFY_HOT_MODES)}"),
    ("tier_timeout_s", lambda v: _is_number(v, 0.001, 3600), "seconds in 0.001 … 3600"),
    ("salt", lambda v: isinstance(v, str), "text"),
    *((name, _is_text, "text, or None") for name in ("lookup_url", "distributed_url", "sidecar_socket")),
    *((name, lambda v: isinstance(v, bool), "true or false") for name in _BOOLEANS),
)

_DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(LMCacheEngineConfig.from_defaults).parameters.items()
    if parameter.default is not parameter.empty
}


def _flat(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a function, those in its `**options` among them."""
    return {**{name: value for name, value in arguments.items() if name != "options"}, **arguments["options"]}


def _build(values: Mapping[str, Any], origin: str) -> LMCacheEngineConfig:
    known = [f.name for f in dataclasses.fields(LMCacheEngineConfig)]
    for name in values:
        if name not in known:
            raise ConfigError(f"{origin}: unknown option {name!r}{_did_you_mean(str(name), known)}")
    return LMCacheEngineConfig(**values)


def _did_you_mean(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def _option_of(variable: str, text: str) -> str | None:
    if not variable.startswith(ENV_PREFIX) or variable in _OTHER_ENV_NAMES:
        return None
    option = variable.removeprefix(ENV_PREFIX).lower()
    known = [f.name for f in dataclasses.fields(LMCacheEngineConfig)]
    if option in known:
        return option
    if variable.startswith(SERVICE_ENV_PREFIXES) or _LINK_NAME.search(variable) or _LINK_VALUE.match(text):
        return None
    raise ConfigError(f"environment: {variable} names no option{_did_you_mean(option, known)}")


def _parse(option: str, text: str) -> Any:
    kind = {f.name: str(f.type) for f in dataclasses.fields(LMCacheEngineConfig)}[option]
    if kind == "bool":
        if text.strip().lower() not in ("true", "1", "false", "0"):
            raise ConfigError(f"environment: {ENV_PREFIX}{option.upper()}={text!r}: must be true or false")
        return text.strip().lower() in ("true", "1")
    if kind in ("int", "float"):
        try:
            return int(text) if kind == "int" else float(text)
        except ValueError as exc:
            raise ConfigError(f"environment: {ENV_PREFIX}{option.upper()}={text!r}: must be a number") from exc
    return None if "None" in kind and text.strip().lower() in ("", "none", "null") else text
