"""Which weights made the KV: a fingerprint of the model's files, or of a LoRA adapter's."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcache_core.errors import LayoutError
from lmcache_core.integrations.vllm.file_digests import file_digests

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
FileVersions = tuple[tuple[str, int, int], ...]
"""Name, size and time of the last change of each file."""
_COMMIT = re.compile("[0-9a-f]{40}")
_NOT_OF_THE_KV = frozenset(
    {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache"}
)


def model_fingerprint(
    model: str, revision: str | None, hf_config: Any, download_dir: str | None = None
) -> str | None:
    """Text that differs for other weights, whatever path they have; None where nothing tells which
    weights they are.

    Every byte of a folder's weights is read (`file_digests`).

    Args:
        model: Folder of the model, or its only file, or its name on a hub.
        revision: Its revision, if one was asked for.
        hf_config: Its `transformers` configuration; None where it is not from the same place as the
            weights.
        download_dir: Where vLLM keeps what it downloads; None: where the hub's library does.

    Raises:
        LayoutError: The files change while they are read, or cannot be read.
    """
    path = Path(model)
    if path.exists():
        files = [path] if path.is_file() else _files(path, WEIGHT_SUFFIXES)
        try:
            return "files-" + _files_fingerprint(files) if files else None
        except OSError as exc:
            raise LayoutError(f"the weights in {model} cannot be read: {exc}") from exc
    # A branch or a tag may be other weights tomorrow: only a commit says which.
    told = getattr(hf_config, "_commit_hash", None)
    if told is None:
        folder = downloaded_folder(model, revision, download_dir)
        told = (revision or "") if folder is None else folder.name
    return f"hub-{model}@{told}" if _COMMIT.fullmatch(told) else None


def downloaded_folder(
    name: str, revision: str | None = None, download_dir: str | None = None
) -> Path | None:
    """Where a hub's repository has been downloaded to; None where it has not been, or the name
    is none.
    """
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        options = {"revision": revision, "cache_dir": download_dir, "local_files_only": True}
        return Path(hub.snapshot_download(repo_id=name, **options))
    except (ImportError, OSError, ValueError):
        return None


def options_fingerprint(hf_config: Any) -> str:
    """Text that differs when the same weights would give other KV: position encoding,
    activation, attention, norm.
    """
    options = hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config)
    return hashlib.sha256(
        json.dumps(_without_names(options), sort_keys=True, default=str).encode()
    ).hexdigest()[:32]


def adapter_fingerprint(folder: Path) -> str:
    """Text that differs for other LoRA weights: of the whole content of the adapter's files."""
    files = _files(folder, frozenset({".json", *WEIGHT_SUFFIXES}))
    # The scheduler's thread asks: reading an adapter twice is better than an engine that waits.
    return "files-" + _files_fingerprint(files, lock_wait_s=0.0)


def adapter_version(folder: Path) -> FileVersions:
    """Changes when an adapter's files may have changed; cheap enough for every request."""
    stats = (
        (file.name, file.stat()) for file in _files(folder, frozenset({".json", *WEIGHT_SUFFIXES}))
    )
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _files_fingerprint(files: Sequence[Path], lock_wait_s: float | None = None) -> str:
    digest = hashlib.sha256()
    for file, content in zip(files, file_digests(files, lock_wait_s), strict=True):
        digest.update(f"{file.name}\0{content}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _files(folder: Path, suffixes: frozenset[str]) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in suffixes and file.is_file())


def _without_names(options: Any) -> Any:
    if isinstance(options, Mapping):
        return {
            str(name): _without_names(value)
            for name, value in options.items()
            if name not in _NOT_OF_THE_KV
        }
    return options
