"""Where KV to measure comes from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lmcache_ctl.codec.kv import CHUNK_TOKENS, kv_of_file, kv_of_model, load_kv, synthetic_kv
from lmcache_ctl.errors import CtlError
from lmcache_demo.model import MODEL_DIR, load_model
from safetensors.torch import save_file


def file_of(directory: Path, **tensors: torch.Tensor) -> Path:
    path = directory / "kv.safetensors"
    save_file(tensors, path, metadata={"about": "a test"})
    return path


def forged(directory: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = directory / "forged.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(**changes: object) -> dict[str, object]:
    return {"kv": {"dtype": "F16", "shape": [2, 1, 2, 1], "data_offsets": [0, 8]} | changes}


def test_made_up_kv_is_the_same_every_time() -> None:
    first, second = synthetic_kv(3), synthetic_kv(3)
    [tensor] = first.tensors
    assert (tensor.dtype, tensor.values.shape) == ("bfloat16", (2, 32, 3, 1024))
    assert np.array_equal(tensor.values, second.tensors[0].values)
    assert np.isfinite((tensor.values.astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8]
)
def test_a_file_of_one_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(2 * 3 * 5 * 4).reshape(2, 3, 5, 4).to(dtype)
    kv = kv_of_file(file_of(tmp_path, anything=tensor), 100)
    [found] = kv.tensors
    assert (found.group, found.dtype, kv.num_tokens) == ("", str(dtype).removeprefix("torch."), 5)
    [(specs, payload)] = kv.chunks()
    assert payload == bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert (specs[0].shape, specs[0].length) == ((2, 3, 5, 4), len(payload))


def test_a_file_of_groups_in_chunks(tmp_path: Path) -> None:
    num_tokens = CHUNK_TOKENS + 10
    full, window = (
        torch.randn(2, 1, num_tokens + 5, 4),
        torch.randn(1, 2, num_tokens + 5, 8, dtype=torch.float16),
    )
    kv = kv_of_file(file_of(tmp_path, full=full, window=window), num_tokens)
    (first, payload), (last, rest) = kv.chunks()
    assert [(spec.group, spec.dtype, spec.shape) for spec in first] == [
        ("full", "float32", (2, 1, CHUNK_TOKENS, 4)),
        ("window", "float16", (1, 2, CHUNK_TOKENS, 8)),
    ]
    assert first[1].offset == first[0].length
    assert len(payload) == sum(spec.length for spec in first)
    assert [spec.shape[2] for spec in last] == [10, 10]
    assert (
        rest[last[1].offset :]
        == window[:, :, CHUNK_TOKENS:num_tokens].contiguous().numpy().tobytes()
    )


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"a": torch.zeros(3, 4)}, r"\[sides, layers, tokens, channels\]"),
        ({"a": torch.zeros(2, 1, 0, 4)}, r"\[sides, layers, tokens, channels\]"),
        ({"a": torch.zeros(2, 1, 3, 4, dtype=torch.int64)}, "is of I64"),
        ({"a": torch.zeros(2, 1, 3, 4), "b": torch.zeros(2, 1, 4, 4)}, "3, 4 tokens"),
        ({}, "no tensor"),
    ],
)
def test_files_of_something_else(
    tmp_path: Path, tensors: dict[str, torch.Tensor], told: str
) -> None:
    with pytest.raises(CtlError, match=told):
        kv_of_file(file_of(tmp_path, **tensors), 100)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"{", b""),
        (b"\xff", b""),
        (b"[" * 100_000, b""),
        ([], b""),
        ({"kv": 1}, b""),
        ({"kv": {}}, b""),
        (entry(), b"1234567"),
        (entry(data_offsets=[0, 9]), bytes(9)),
        (entry(data_offsets=[-8, 0]), bytes(8)),
        (entry(data_offsets=[8, 0]), bytes(8)),
        (entry(data_offsets="ab"), bytes(8)),
        (entry(shape=[2, 1, 2, 1 << 60]), bytes(8)),
        (entry(shape=[2, 1, 2, True]), bytes(8)),
        (entry(shape=4), bytes(8)),
        (entry(dtype=["F16"]), bytes(8)),
    ],
)
def test_forged_files(tmp_path: Path, header: object, data: bytes) -> None:
    with pytest.raises(CtlError):
        kv_of_file(forged(tmp_path, header, data), 100)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\xff" * 100, (1 << 20).to_bytes(8, "little")]
)
def test_files_that_are_too_short(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(CtlError):
        kv_of_file(path, 100)


def test_a_models_own_kv() -> None:
    """Layer by layer what the model keeps, in chunks."""
    kv = kv_of_model(MODEL_DIR, 40)
    [tensor] = kv.tensors
    assert (tensor.dtype, tensor.values.shape[0], kv.num_tokens) == ("bfloat16", 2, 40)
    model, _ = load_model("bfloat16")
    assert tensor.values.shape[1] == model.config.num_hidden_layers
    assert tensor.values.shape[3] == model.config.num_key_value_heads * model.config.head_dim
    assert np.isfinite((tensor.values.astype(np.uint32) << 16).view(np.float32)).all()
    assert len(np.unique(tensor.values)) > 1000


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CtlError, match="cannot load a model"):
        load_kv(None, tmp_path, 10)
