"""Which weights made the KV: a fingerprint of the model's files, or of a LoRA adapter's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

SAMPLE_BYTES = 1 << 20
"""Read from both ends of each file of the model."""
SPOT_BYTES = 512
"""Read from the middle and the end of each tensor: another training changes a tensor everywhere, but maybe not every tensor."""
MAX_SPOTS = 8192
"""Spots in one file; of a file with more tensors, every so many-th is read."""
MAX_HEADER_BYTES = 100 << 20
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
MAX_FILES = 4096
FileVersions = tuple[tuple[str, int, int], ...]
"""Name, size and time of the last change of each file."""
_NOT_OF_THE_KV = frozenset({"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache"})


class _Entry(msgspec.Struct):
    """A tensor in the header of a safetensors file; what else stands there has no place in the file."""

    data_offsets: tuple[int, int] | None = None


_HEADER = msgspec.json.Decoder(dict[str, _Entry])


def model_fingerprint(model: str, revision: str | None, hf_config: Any) -> str | None:
    """Text that differs for other weights, whatever path or name they have; None for a folder without weights, which are then elsewhere.

    Args:
        model: Folder of the model, or its only file, or its name on a hub.
        revision: Its revision, if one was asked for.
        hf_config: Its `transformers` configuration.
    """
    path = Path(model)
    if path.exists():
        files = [path] if path.is_file() else _files(path, WEIGHT_SUFFIXES)
        return "files-" + _files_fingerprint(files) if files else None
    commit = getattr(hf_config, "_commit_hash", None)
    return f"hub-{model}@{commit or revision or 'main'}"


def options_fingerprint(hf_config: Any) -> str:
    """Text that differs when the same weights would give other KV: position encoding, activation, attention, norm."""
    options = hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config)
    return hashlib.sha256(json.dumps(_without_names(options), sort_keys=True, default=str).encode()).hexdigest()[:32]


def adapter_fingerprint(folder: Path) -> str:
    """Text that differs for other LoRA weights: of the whole content of the adapter's files."""
    digest = hashlib.sha256()
    for file in _files(folder, frozenset({".json", *WEIGHT_SUFFIXES})):
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return "files-" + digest.hexdigest()[:32]


def adapter_version(folder: Path) -> FileVersions:
    """Changes when an adapter's files may have changed; cheap enough for every request."""
    stats = ((file.name, file.stat()) for file in _files(folder, frozenset({".json", *WEIGHT_SUFFIXES})))
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _files_fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as content:
            for start, length in ((0, SAMPLE_BYTES), (max(0, size - SAMPLE_BYTES), SAMPLE_BYTES), *_spots(content, size)):
                content.seek(start)
                digest.update(content.read(length))
    return digest.hexdigest()[:32]


def _spots(content: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Where to look into a file, and how far: into each tensor of a safetensors file, evenly into another."""
    content.seek(0)
    begin = 8 + int.from_bytes(content.read(8), "little")
    ends = list(range(0, size, max(SPOT_BYTES, size // MAX_SPOTS)))
    if begin <= min(size, MAX_HEADER_BYTES):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # another format
            header = _HEADER.decode(content.read(begin - 8))
            bounds = [entry.data_offsets for entry in header.values() if entry.data_offsets is not None]
            ends = [begin + end for low, high in bounds for end in ((low + high) // 2, high)]
    step = math.ceil(len(ends) / MAX_SPOTS) or 1
    return [(max(end - SPOT_BYTES, 0), SPOT_BYTES) for end in ends[::step]]


def _files(folder: Path, suffixes: frozenset[str]) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in suffixes and file.is_file())[:MAX_FILES]


def _without_names(options: Any) -> Any:
    if isinstance(options, Mapping):
        return {str(name): _without_names(value) for name, value in options.items() if name not in _NOT_OF_THE_KV}
    return options
