"""The interface of a backend of tensors."""

from __future__ import annotations

import pytest
import torch
from lmcache_core.storage import LMCBackendInterface

from tests.suites.chunks import make_key


def key(name: object):
    return make_key(name).key


class Plain(LMCBackendInterface):
    def __init__(self, dst_device: str = "cuda") -> None:
        super().__init__(dst_device)
        self.tensors: dict[object, torch.Tensor] = {}

    def put(self, key, kv_chunk, blocking=True):
        self.tensors[key] = kv_chunk

    def contains(self, key):
        return key in self.tensors

    def get(self, key):
        return self.tensors.get(key)

    def close(self): ...


def test_batches_fall_back_to_single_calls() -> None:
    plain = Plain()
    assert plain.dst_device == "cuda"
    assert plain.batched_put([(key(i), torch.full((2,), i)) for i in range(3)]) == 3
    got = list(plain.batched_get([key(1), key("never")]))
    assert got[0].tolist() == [1, 1]
    assert got[1] is None
    with pytest.raises(RuntimeError):
        Plain("abacus")
    with pytest.raises(TypeError):
        LMCBackendInterface("cpu")  # type: ignore[abstract]
