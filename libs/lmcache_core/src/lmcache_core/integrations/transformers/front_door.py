"""`open`: a model in front of a cache, in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from lmcache_core.config import OPTIONS, LMCacheEngineConfig
from lmcache_core.config.options import did_you_mean, directory_of_url, shown
from lmcache_core.config.sources import DEFAULT_DISK_GB
from lmcache_core.engine.engine import create_engine
from lmcache_core.errors import ConfigError
from lmcache_core.integrations.transformers.cached import CachedCausalLM
from lmcache_core.integrations.transformers.identity import connector_for, described
from lmcache_core.integrations.transformers.watched import WatchedModel

_OWN_NAMES = MappingProxyType(
    {
        "max_local_cpu_size": "memory_gb",
        "local_disk": "disk",
        "max_local_disk_size": "disk_gb",
        "remote_url": "remote",
        "sidecar_socket": "sidecar",
    }
)
"""Options of the engine that `open` has a parameter for."""
_PARAMETERS = (*_OWN_NAMES.values(), "name", "separator")


def open(
    model: PreTrainedModel,
    *,
    memory_gb: float = 2.0,
    disk: str | os.PathLike[str] | None = None,
    disk_gb: float = DEFAULT_DISK_GB,
    remote: str | None = None,
    sidecar: str | os.PathLike[str] | None = None,
    name: str | None = None,
    **options: Any,
) -> CachedCausalLM:
    """Put a causal LM of Hugging Face transformers in front of a cache.

    Use it in a `with` statement, or call `close`: pending writes are finished then, or when the
    interpreter ends. In a forked process it finds nothing: open it in each worker.

    Args:
        model: In eval mode, with full attention on every layer; not changed, but run on a few
            tokens. It may change later: KV is then named by what it has become, see
            `CachedCausalLM`.
        memory_gb: Host memory for chunks, taken at once; ignored with a sidecar.
        disk: Directory for chunks, a path or a `file://` URL; none: no disk.
        remote: URL of the remote tier, such as `lm://host:65432`; none: nothing is shared.
        sidecar: Unix socket of the pod's sidecar, whose tiers then replace all of these.
        name: Name under which the model's KV is shared; by default that of the repository or
            directory it was loaded from. Other weights never share KV, whatever the name.
        **options: Any other option of `LMCacheEngineConfig`; and `separator`, the token ids that
            end a document, with `enable_blending`.

    Raises:
        ConfigError: An option is unknown, its value impossible, or it contradicts another.
        TypeError: The model is not a loaded one, or the name not a string.
        ValueError: The model's KV cannot be cached, see `metadata_of`.
    """
    # by attribute, not by class: adapters and compiled models wrap a PreTrainedModel
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "name_or_path"):
        raise TypeError(
            f"model={shown(model)}: must be a loaded model, such as"
            " AutoModelForCausalLM.from_pretrained(...) returns"
        )
    if not isinstance(name, str | None):
        raise TypeError(f"name={shown(name)}: must be a string, or none")
    separator = options.pop("separator", None)
    _check_names(options)
    if disk is not None:
        options |= {"local_disk": _directory_url(disk), "max_local_disk_size": disk_gb}
    try:
        config = LMCacheEngineConfig.from_defaults(
            max_local_cpu_size=memory_gb,
            remote_url=remote,
            sidecar_socket=os.fspath(sidecar) if isinstance(sidecar, os.PathLike) else sidecar,
            **options,
        )
    except ConfigError as exc:
        raise ConfigError(_in_own_names(str(exc))) from exc
    if config.local_disk is not None:
        _make_directory(config.local_disk, disk)
    name = name or _name_of(model)
    watched = WatchedModel(model, name)
    known = watched.known()
    engine = create_engine(config, described(known, name, config), connector_for(known.kv))
    engine.open()
    try:
        return CachedCausalLM(model, engine, separator, owns_engine=True, watched=watched)
    except BaseException:
        engine.close()
        raise


def _check_names(options: Mapping[str, object]) -> None:
    known = [*dict.fromkeys((*_PARAMETERS, *(OPTIONS.keys() - _OWN_NAMES.keys())))]
    for option, value in options.items():
        if option in _OWN_NAMES:
            raise ConfigError(f"{option}={shown(value)}: open calls it {_OWN_NAMES[option]}")
        if option not in OPTIONS:
            raise ConfigError(f"open has no option {option!r}{did_you_mean(option, known)}")


def _make_directory(url: str, disk: object) -> None:
    """Make the directory of the disk now: a typing error shall not become a node's broken disk."""
    try:
        Path(directory_of_url(url)).mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"disk={shown(disk)}: is no directory and cannot be made one: {exc.strerror}"
        ) from exc


def _in_own_names(text: str) -> str:
    for option, parameter in _OWN_NAMES.items():
        text = text.replace(f"{option}=", f"{parameter}=")
    return text


def _name_of(model: PreTrainedModel) -> str:
    """Return a name that is the same wherever a directory lies; `blend.certify` agrees."""
    source: str = model.name_or_path
    if source and Path(source).is_dir():
        source = Path(os.path.abspath(source)).name  # noqa: PTH100 (a link keeps its own name)
    return source or str(getattr(model.config, "model_type", type(model).__name__))


def _directory_url(value: Any) -> Any:
    """Return the URL of a path, also of a relative one. The config judges what is none."""
    is_path = isinstance(value, os.PathLike) or (
        isinstance(value, str) and value != "" and "://" not in value
    )
    return Path(value).expanduser().absolute().as_uri() if is_path else value
