"""Which weights made the KV: a fingerprint of the model's files, or of a LoRA adapter's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SAMPLE_BYTES = 1 << 20
"""Read from both ends of each file of the model: tensors of another training differ in their first megabyte."""
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
MAX_FILES = 4096
_NOT_OF_THE_KV = frozenset({"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache"})


def model_fingerprint(model: str, revision: str | None, hf_config: Any) -> str:
    """Text that differs for other weights, whatever path or name they have.

    Args:
        model: Folder of the model, or its name on a hub.
        revision: Its revision, if one was asked for.
        hf_config: Its `transformers` configuration.
    """
    folder = Path(model)
    if folder.is_dir():
        return "files-" + _files_fingerprint(folder)
    commit = getattr(hf_config, "_commit_hash", None)
    return f"hub-{model}@{commit or revision or 'main'}"


def options_fingerprint(hf_config: Any) -> str:
    """Text that differs when the same weights would give other KV: position encoding, activation, attention, norm."""
    options = hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config)
    return hashlib.sha256(json.dumps(_without_names(options), sort_keys=True, default=str).encode()).hexdigest()[:32]


def adapter_fingerprint(path: str) -> str:
    """Text that differs for other LoRA weights: of the whole content of the adapter's files, or the path if that is no folder."""
    folder = Path(path)
    if not folder.is_dir():
        return f"path-{path}"
    digest = hashlib.sha256()
    for file in _files(folder, frozenset({".json", *WEIGHT_SUFFIXES})):
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return "files-" + digest.hexdigest()[:32]


def adapter_version(path: str) -> tuple[tuple[str, int, int], ...]:
    """Changes when an adapter's files may have changed; cheap enough for every request."""
    folder = Path(path)
    if not folder.is_dir():
        return ()
    stats = ((file.name, file.stat()) for file in _files(folder, frozenset({".json", *WEIGHT_SUFFIXES})))
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _files_fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in _files(folder, WEIGHT_SUFFIXES):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as content:
            digest.update(content.read(SAMPLE_BYTES))
            content.seek(max(0, size - SAMPLE_BYTES))
            digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _files(folder: Path, suffixes: frozenset[str]) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in suffixes and file.is_file())[:MAX_FILES]


def _without_names(options: Any) -> Any:
    if isinstance(options, Mapping):
        return {str(name): _without_names(value) for name, value in options.items() if name not in _NOT_OF_THE_KV}
    return options
