"""KV to measure codecs on: synthetic, read from a file, or computed by a Hugging Face model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE
from lmcache_core.record import TensorSpec

from lmcache_ctl.errors import CtlError

Array = npt.NDArray[Any]

CHUNK_TOKENS = 256
"""What engines cut prompts into unless told otherwise."""
SEED = 20
SYNTHETIC_LAYERS, SYNTHETIC_CHANNELS = 32, 1024
SMOOTHNESS = 0.8
MAX_FILE_HEADER_BYTES = 16 << 20
_LENGTH_BYTES = 8
_DIMENSIONS = "[sides, layers, tokens, channels]"
_FILE_DTYPES: Final = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "U8": "uint8",
}


@dataclass(frozen=True)
class KvTensor:
    """KV of one group of layers.

    Attributes:
        group: Its name, "" for the only one.
        dtype: Name of its dtype.
        values: Its bits, unsigned integers `[sides, layers, tokens, channels]`; sides are keys and
            values, or one where they are one.
    """

    group: str
    dtype: str
    values: Array


@dataclass(frozen=True)
class Kv:
    """KV of some tokens.

    Attributes:
        source: Where it is from, for people.
        tensors: One or more, of the same tokens.
    """

    source: str
    tensors: tuple[KvTensor, ...]

    @property
    def num_tokens(self) -> int:
        """How many tokens."""
        return int(self.tensors[0].values.shape[2])

    def chunks(self) -> Iterator[tuple[tuple[TensorSpec, ...], memoryview]]:
        """Yield chunks of at most `CHUNK_TOKENS`: what each holds, and its raw payload."""
        for begin in range(0, self.num_tokens, CHUNK_TOKENS):
            specs, pieces, at = [], [], 0
            for tensor in self.tensors:
                piece = np.ascontiguousarray(tensor.values[:, :, begin : begin + CHUNK_TOKENS])
                specs.append(TensorSpec(tensor.group, tensor.dtype, piece.shape, at, piece.nbytes))
                pieces.append(piece.tobytes())
                at += piece.nbytes
            yield tuple(specs), memoryview(b"".join(pieces))


def load_kv(file: Path | None, model: Path | None, num_tokens: int) -> Kv:
    """Return KV from a file, else from a model, else synthetic KV.

    Args:
        file: A safetensors file, see `kv_of_file`.
        model: Directory of a Hugging Face model.
        num_tokens: Most tokens to return.

    Raises:
        CtlError: It cannot be had.
    """
    if file is not None:
        return kv_of_file(file, num_tokens)
    return synthetic_kv(num_tokens) if model is None else kv_of_model(model, num_tokens)


def synthetic_kv(num_tokens: int) -> Kv:
    """Make up KV, bfloat16 in the shape of Llama-3.1-8B, the same every time.

    Each channel varies around its own mean: normal noise, smoothed from token to token. Speeds are
    realistic; its compression says little about a model.
    """
    random = np.random.default_rng(SEED)
    shape = (2, SYNTHETIC_LAYERS, SYNTHETIC_CHANNELS)
    spread = np.exp(0.5 * random.standard_normal(shape, np.float32))
    mean = spread * random.standard_normal(shape, np.float32)
    values = np.empty((*shape[:2], num_tokens, shape[2]), np.uint16)
    state = random.standard_normal(shape, np.float32)
    fresh = math.sqrt(1 - SMOOTHNESS**2)
    for token in range(num_tokens):
        bits = (mean + spread * state).view(np.uint32) >> np.uint32(16)
        values[:, :, token] = bits.astype(np.uint16)
        state = SMOOTHNESS * state + np.float32(fresh) * random.standard_normal(shape, np.float32)
    source = "synthetic KV, bfloat16 in the shape of Llama-3.1-8B"
    return Kv(source, (KvTensor("", "bfloat16", values),))


def kv_of_file(path: Path, num_tokens: int) -> Kv:
    """Map KV from a safetensors file.

    Args:
        path: Each of its tensors is a group of layers, `[sides, layers, tokens, channels]`.
        num_tokens: Take this many tokens from the start of each.

    Raises:
        CtlError: The file cannot be read, is not a safetensors file, or does not hold KV.
    """
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as exc:
        raise CtlError(f"cannot read {path}: {exc}") from exc
    header_bytes = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    begin = _LENGTH_BYTES + header_bytes
    if len(data) < _LENGTH_BYTES or header_bytes > MAX_FILE_HEADER_BYTES or begin > len(data):
        raise CtlError(
            f"{path} is not a safetensors file: its first bytes are not the length of a header"
        )
    try:
        header = json.loads(data[_LENGTH_BYTES:begin].tobytes())
    except (ValueError, RecursionError) as exc:
        raise CtlError(f"{path} is not a safetensors file: its header is not JSON") from exc
    entries = (
        {name: entry for name, entry in header.items() if name != "__metadata__"}
        if isinstance(header, dict)
        else {}
    )
    if not entries:
        raise CtlError(f"{path} holds no tensor")
    is_only = len(entries) == 1
    tensors = tuple(
        _tensor(path, data[begin:], name, entry, "" if is_only else name)
        for name, entry in sorted(entries.items())
    )
    counts = {int(tensor.values.shape[2]) for tensor in tensors}
    if len(counts) != 1:
        raise CtlError(
            f"{path}: its tensors have {', '.join(map(str, sorted(counts)))} tokens; all must be of"
            " the same ones"
        )
    cut = (replace(tensor, values=tensor.values[:, :, :num_tokens]) for tensor in tensors)
    return Kv(f"KV of {path.name}", tuple(cut))


def _tensor(path: Path, data: Array, name: str, entry: Any, group: str) -> KvTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        is_shape = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as exc:
        raise CtlError(
            f"{path}: the entry of tensor {name[:80]!r} is not one of safetensors"
        ) from exc
    if not isinstance(dtype, str) or dtype not in _FILE_DTYPES:
        raise CtlError(
            f"{path}: tensor {name[:80]!r} is of {dtype!s:.20}; KV is of one of"
            f" {', '.join(_FILE_DTYPES)}"
        )
    if not is_shape or len(shape) != len(_DIMENSIONS.split()) or 0 in shape:
        raise CtlError(
            f"{path}: tensor {name[:80]!r} is of shape {shape!s:.80}; KV is {_DIMENSIONS}, sides"
            " being keys and values"
        )
    itemsize = DTYPE_ITEMSIZE[_FILE_DTYPES[dtype]]
    if not begin <= end <= len(data) or end - begin != math.prod(shape) * itemsize:
        raise CtlError(
            f"{path}: the bytes of tensor {name[:80]!r} are not those of its shape, or are not in"
            " the file"
        )
    values = np.ndarray(shape, f"<u{itemsize}", data, begin)
    return KvTensor(group, _FILE_DTYPES[dtype], values)


def kv_of_model(directory: Path, num_tokens: int) -> Kv:
    """Compute the KV of the first tokens of Python's own documentation, in the weights' dtype.

    Args:
        directory: Model and tokenizer as Hugging Face saves them; nothing is downloaded, and none
            of its code is run. Needs torch and transformers.
        num_tokens: How many tokens, or fewer where the model takes no more.

    Raises:
        CtlError: It cannot be loaded, or does not keep the KV of every token.
    """
    import torch
    from lmcache_core.memory.dtypes import dtype_name
    from lmcache_core.memory.views import bytes_under

    from lmcache_ctl.model import load_model, own_text

    model, tokenizer = load_model(directory)
    longest = getattr(model.config, "max_position_embeddings", None) or num_tokens
    with torch.inference_mode():
        tokens = tokenizer.encode(own_text(), verbose=False)[: min(num_tokens, longest)]
        cache = model(
            input_ids=torch.tensor([tokens]), use_cache=True, logits_to_keep=1
        ).past_key_values
        sides: list[list[Any]] = [
            [getattr(layer, side, None) for layer in getattr(cache, "layers", [])]
            for side in ("keys", "values")
        ]
        shapes = {None if kv is None else tuple(kv.shape) for side in sides for kv in side}
        shape = shapes.pop() if len(shapes) == 1 else None
        if shape is None or len(shape) != 4 or shape[2] != len(tokens):
            raise CtlError(
                f"{directory}: its layers do not all keep the KV of every token in one shape; only"
                " such models can be measured"
            )
        kv = torch.stack([torch.stack([layer[0] for layer in side]) for side in sides])
        # [sides, layers, heads, tokens, size] -> [sides, layers, tokens, channels]
        kv = kv.transpose(2, 3).flatten(3).contiguous()
    name = dtype_name(kv.dtype)
    values = np.frombuffer(bytes_under(kv), f"<u{DTYPE_ITEMSIZE[name]}").reshape(tuple(kv.shape))
    return Kv(f"KV that the model in {directory} computed, {name}", (KvTensor("", name, values),))
