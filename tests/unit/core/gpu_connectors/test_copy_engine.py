"""Long runs of bytes between pages and pinned host memory, moved by copy engines (what they copy:
`tests/contract/test_gpu_connectors.py`).
"""

from __future__ import annotations

import pytest
import torch
from lmcache_core.gpu_connectors import KVLayout, PagedGPUConnector, copy_engine
from lmcache_core.gpu_connectors.streams import LaunchedCopies

from tests.fixtures.cuda_streams import Runtime, install
from tests.suites.connector_suite import SLOTS, make_memory
from tests.suites.kv_caches import make_kv_caches, one_group, same, snapshot

LAYOUT = one_group()
BEGIN, END = 4, 13


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return install(monkeypatch, has_copy_engines=True)


def kwargs_of(seed: int, layout: KVLayout = LAYOUT, **more):
    slots = torch.tensor(SLOTS)
    return {"kvcaches": make_kv_caches(layout, seed), "slot_mapping": slots} | more


def moved(connector: PagedGPUConnector, source, target) -> bool:
    """Store and load; whether what was stored came back."""
    memory = make_memory(connector.get_shape(END - BEGIN), "bfloat16")
    connector.from_gpu(memory, BEGIN, END, **source)
    connector.to_gpu(memory, BEGIN, END, **target)
    again = make_memory(connector.get_shape(END - BEGIN), "bfloat16")
    connector.from_gpu(again, BEGIN, END, **target)
    return bytes(again.byte_array) == bytes(memory.byte_array)


def kinds(runtime: Runtime) -> set[str]:
    return {line.split()[0] for line in runtime.log} - {"wait"}


def test_it_takes_no_memory_of_the_device_and_no_kernel(runtime: Runtime) -> None:
    assert moved(PagedGPUConnector(LAYOUT, 16), kwargs_of(1), kwargs_of(50))
    assert kinds(runtime) == {"runs"}
    assert not runtime.taken


def test_copies_start_behind_what_is_before_and_end_when_they_say(runtime: Runtime) -> None:
    """Loads and stores on the streams that staged ones use, in turn."""
    connector, source, target = PagedGPUConnector(LAYOUT, 16), kwargs_of(1), kwargs_of(50)
    memory = make_memory(connector.get_shape(END - BEGIN), "bfloat16")
    with runtime.chosen(engine := runtime.make()):
        written = source["kvcaches"][0][0]
        engine.launch(lambda: written.fill_(7.0))
        after = engine.record_event()
    launched = LaunchedCopies()
    connector.from_gpu(memory, BEGIN, END, after=after, **connector.launching(source, launched))
    before, untouched = snapshot(target["kvcaches"]), bytes(memory.byte_array)
    connector.to_gpu(memory, BEGIN, END, **connector.launching(target, launched))
    assert same(snapshot(target["kvcaches"]), before)
    assert bytes(memory.byte_array) == untouched
    launched.wait_for_first()
    assert bool((memory.tensor[0, 0] == 7.0).all())
    assert same(snapshot(target["kvcaches"]), before)
    launched.wait()
    assert not same(snapshot(target["kvcaches"]), before)


@pytest.mark.parametrize("why", ["short", "pageable", "pageable end", "old driver", "device slots"])
def test_kernels_copy_what_it_does_not_take(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    source = kwargs_of(1)
    if why == "short":
        monkeypatch.setattr(copy_engine, "LEAST_RUN_BYTES", 1 << 10)
    elif why == "pageable":
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    elif why == "pageable end":
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: len(tensor) > 1)
    elif why == "old driver":
        monkeypatch.setattr(copy_engine, "batched_copy", lambda: None)
    else:
        connector = PagedGPUConnector(LAYOUT, 16)
        addresses = connector.addresses_of(*source.values(), BEGIN, END)
        for slots in addresses.slots:
            object.__setattr__(slots, "on_host", None)  # as if they had been given on a device
        source = {"addresses": addresses}
    target = source if why == "device slots" else kwargs_of(50)
    assert moved(PagedGPUConnector(LAYOUT, 16), source, target)
    assert kinds(runtime) == {"gather", "scatter", "copy"}


def test_a_driver_that_refuses_is_not_asked_again(runtime: Runtime) -> None:
    connector = PagedGPUConnector(LAYOUT, 16)
    memory = make_memory(connector.get_shape(END - BEGIN), "bfloat16")
    runtime.copy_error = 801
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync: error 801"):
        connector.from_gpu(memory, BEGIN, END, **kwargs_of(1))
    assert moved(connector, kwargs_of(1), kwargs_of(50))
    assert kinds(runtime) == {"gather", "scatter", "copy"}


def test_no_run_is_in_two_registrations_of_host_memory(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector, source = PagedGPUConnector(LAYOUT, 16), kwargs_of(1)
    memory, again = (make_memory(connector.get_shape(END - BEGIN), "bfloat16") for _ in range(2))
    connector.from_gpu(memory, BEGIN, END, **source)
    longest, num_runs = max(size for _, _, size in runtime.runs), len(runtime.runs)
    runtime.runs.clear()
    monkeypatch.setattr(copy_engine, "COPY_BOUNDARY_BYTES", longest)
    connector.from_gpu(again, BEGIN, END, **source)
    assert bytes(again.byte_array) == bytes(memory.byte_array)
    assert len(runtime.runs) > num_runs
    assert all(target % longest + size <= longest for target, _, size in runtime.runs)
