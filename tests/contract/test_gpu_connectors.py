"""The GPU connectors of this repository against their contract, each for the layouts that it
takes.
"""

from __future__ import annotations

import pytest
import torch
from lmcache_core.gpu_connectors import (
    KVLayout,
    LayerGroup,
    Order,
    Packing,
    PagedGPUConnector,
    VLLMNestedTupleGPUConnector,
    VLLMPagedMemGPUConnector,
    VLLMPagedMemGPUConnectorV2,
)

from tests.fixtures import cuda_streams
from tests.suites.connector_suite import (
    NUM_TOKENS,
    ConnectorSuite,
    ConnectorUnderTest,
    PagedConnectorSuite,
    PagedUnderTest,
)
from tests.suites.kv_caches import one_group, random_tensor

HIDDEN, NUM_LAYERS = 15, 2
SLIDING = LayerGroup("sliding", 2, 3, 5, "bfloat16", packing=Packing.KV_FIRST)
FULL = LayerGroup("full", 1, 1, 16, "bfloat16", order=Order.HND)
LATENT = LayerGroup("latent", 3, 1, 9, "bfloat16", sides=1)
EIGHT_BITS = LayerGroup(
    "eight bits", 2, 2, 7, "float8_e5m2", order=Order.HND, packing=Packing.LAST_DIM
)
DECLARED = {
    **{
        f"{packing} {order}": one_group(packing=packing, order=order)
        for packing in Packing
        for order in Order
    },
    **{
        f"of {dtype}": one_group(dtype=dtype)
        for dtype in ("float32", "float16", "float8_e4m3fn", "float8_e5m2", "uint8")
    },
    "one head": one_group(num_kv_heads=1, head_size=8, packing=Packing.BLOCK_FIRST),
    "latent": KVLayout((LATENT,)),
    "latent HND": one_group(num_kv_heads=1, sides=1, order=Order.HND),
    "hybrid": KVLayout((SLIDING, FULL, LATENT)),
    "hybrid of two dtypes": KVLayout((EIGHT_BITS, SLIDING, LATENT)),
}
DOCUMENTED = {"pairs": Packing.SPLIT, "stacked": Packing.KV_FIRST}


class NestedTupleUnderTest(ConnectorUnderTest):
    def __init__(self, dtype: str) -> None:
        self.layout = one_group(dtype=dtype)
        self.connector = VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)

    def make_engine(self, seed):
        group = self.layout.groups[0]
        sides = [
            random_tensor((NUM_TOKENS, 3, 5), group.dtype, seed * 100 + i)
            for i in range(2 * NUM_LAYERS)
        ]
        return tuple(zip(sides[::2], sides[1::2], strict=True))

    def read(self, engine, group, layer, token):
        return torch.stack([side[token].view(torch.uint8) for side in engine[layer]]).view(
            engine[layer][0].dtype
        )

    def write(self, engine, group, layer, token, cells):
        for side, cell in zip(engine[layer], cells, strict=True):
            side[token] = cell

    def wrong_engines(self):
        engine = self.make_engine(0)
        key, value = engine[-1]
        return {
            "a layer too few": engine[:-1],
            "a last layer of three": (*engine[:-1], (key, value, value)),
            "a last layer of one": (*engine[:-1], (key,)),
            "too few tokens": tuple((k[:6], v[:6]) for k, v in engine),
            "one value too short": (*engine[:-1], (key, value[:6])),
            "another hidden size": (*engine[:-1], (key, value[:, :2])),
            "another dtype of the last value": (
                *engine[:-1],
                (key, value.view(torch.uint8)[..., :5].view(torch.int8)),
            ),
            "another dtype of the last layer": (
                *engine[:-1],
                tuple(t.view(torch.uint8)[..., :5].view(torch.int8) for t in (key, value)),
            ),
        }


class TestNestedTuple(ConnectorSuite):
    @pytest.fixture(params=["float32", "bfloat16", "float8_e4m3fn", "uint8"])
    def under_test(self, request):
        return NestedTupleUnderTest(request.param)


class TestPaged(PagedConnectorSuite):
    @pytest.fixture(params=DOCUMENTED)
    def under_test(self, request):
        return PagedUnderTest(
            VLLMPagedMemGPUConnector(HIDDEN, NUM_LAYERS),
            one_group(packing=DOCUMENTED[request.param]),
        )


class TestPagedV2(PagedConnectorSuite):
    @pytest.fixture(params=DOCUMENTED)
    def under_test(self, request):
        return PagedUnderTest(
            VLLMPagedMemGPUConnectorV2(HIDDEN, NUM_LAYERS),
            one_group(packing=DOCUMENTED[request.param]),
        )


class TestPagedV2Staged(PagedConnectorSuite):
    """Room for fewer tokens than the longest chunk, so that both ways of staging are taken."""

    @pytest.fixture(params=DOCUMENTED)
    def under_test(self, request):
        connector = VLLMPagedMemGPUConnectorV2(
            HIDDEN, NUM_LAYERS, use_gpu=True, chunk_size=8, dtype=torch.bfloat16, device="cpu"
        )
        return PagedUnderTest(connector, one_group(packing=DOCUMENTED[request.param]))


class TestDeclared(PagedConnectorSuite):
    @pytest.fixture(params=DECLARED)
    def under_test(self, request):
        return PagedUnderTest(PagedGPUConnector(DECLARED[request.param]), DECLARED[request.param])


class TestByCopyEngines(PagedConnectorSuite):
    """Long runs are moved without kernels, wherever tokens are contiguous."""

    @pytest.fixture(params=DECLARED)
    def under_test(self, request, monkeypatch):
        runtime = cuda_streams.install(monkeypatch, has_copy_engines=True)
        layout = DECLARED[request.param]
        yield PagedUnderTest(PagedGPUConnector(layout, staging_tokens=8), layout)
        are_apart = any(
            group.num_kv_heads > 1
            and (group.packing is Packing.LAST_DIM or group.order is Order.HND)
            for group in layout.groups
        )
        assert not (runtime.runs if are_apart else runtime.copied_bytes)


class TestDeclaredStrided(PagedConnectorSuite):
    """Tensors whose memory has another order than their shape."""

    @pytest.fixture(
        params=[
            "kv_first NHD",
            "block_first NHD",
            "split HND",
            "last_dim HND",
            "hybrid of two dtypes",
        ]
    )
    def under_test(self, request):
        return PagedUnderTest(
            PagedGPUConnector(DECLARED[request.param]), DECLARED[request.param], is_strided=True
        )


class TestDeclaredStaged(PagedConnectorSuite):
    @pytest.fixture(params=["block_first HND", "latent", "hybrid", "hybrid of two dtypes"])
    def under_test(self, request):
        connector = PagedGPUConnector(DECLARED[request.param], staging_tokens=8)
        return PagedUnderTest(connector, DECLARED[request.param], is_headless=True)
