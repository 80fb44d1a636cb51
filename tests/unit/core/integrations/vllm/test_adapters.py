"""The LoRA weights that a request's KV comes from: no name where that is not certain."""

from __future__ import annotations

import fcntl
from dataclasses import replace
from pathlib import Path

import pytest
from lmcache_core.integrations import file_digests
from lmcache_core.integrations.vllm import adapters as module
from lmcache_core.integrations.vllm.adapters import Adapters
from lmcache_core.integrations.vllm.identity import KVIdentity
from lmcache_core.integrations.vllm.requests import RequestNamer, RequestState

from tests.fixtures.vllm_engine import Adapter, Request
from tests.fixtures.vllm_engine.parts import (
    METADATA,
    PLAIN,
    ScriptedStore,
    groups_of,
    output_of,
    request_of,
    scheduler_side,
)
from tests.fixtures.vllm_engine.worlds import CHUNK_SIZE, make_adapter

REVISION = "c0ffee" * 6 + "c0ff"


@pytest.fixture
def adapters() -> Adapters:
    return Adapters()


def on_hub(monkeypatch: pytest.MonkeyPatch, cache: Path, repository: str, weights: str) -> Adapter:
    """An adapter that has been downloaded, as the hub's client lays it down."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(REVISION)
    make_adapter(folder / "snapshots", weights, REVISION)
    return Adapter("a", repository)


def request_with(adapter: Adapter, name: str) -> Request:
    request = request_of(name=name)
    request.lora_request = adapter
    return request


def test_adapters_are_named_by_name_and_content(adapters: Adapters, tmp_path: Path) -> None:
    first = Adapter("a", str(make_adapter(tmp_path / "1", "one")), 1)
    copied = Adapter("a", str(make_adapter(tmp_path / "2", "one")), 2)
    renamed = Adapter("b", first.lora_path, 3)
    other = Adapter("a", str(make_adapter(tmp_path / "3", "other")), 4)
    found = [adapters.name_of(adapter) for adapter in (first, copied, renamed, other)]
    assert found[0] == found[1]
    assert len({None, "", *found}) == 5


def test_naming_an_adapter_does_not_wait_for_another_process_that_reads_it(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's thread names it: while that waits, the engine does nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_digests, "MIN_REMEMBERED_BYTES", 0)
    monkeypatch.setattr(file_digests.time, "sleep", pytest.fail)
    adapter = Adapter("a", str(make_adapter(tmp_path / "1", "one")), 1)
    name = adapters.name_of(adapter)
    (lock,) = (tmp_path / "cache" / "lmcache").glob("*.lock")
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert Adapters().name_of(adapter) == name


def test_changed_files_name_an_adapter_once_vllm_loads_them(
    adapters: Adapters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then vLLM computes with what it has loaded."""
    adapter = Adapter("a", str(make_adapter(tmp_path, "one")))
    reread, renumbered = replace(adapter, load_inplace=True), replace(adapter, lora_int_id=2)
    before = adapters.name_of(adapter)
    make_adapter(tmp_path, "trained again")
    assert [adapters.name_of(adapter) for _ in range(3)] == [None] * 3
    assert caplog.text.count("have changed") == 1
    after = adapters.name_of(renumbered)
    assert None is not after != before
    assert adapters.name_of(reread) == after
    make_adapter(tmp_path, "and once more")
    assert adapters.name_of(reread) not in {None, before, after}


def test_adapter_under_the_number_of_another_has_no_name(
    adapters: Adapters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM looks at the number alone, and computes with the adapter that it has."""
    first = Adapter("a", str(make_adapter(tmp_path / "1", "one")))
    second = Adapter("b", str(make_adapter(tmp_path / "2", "two")))
    name = adapters.name_of(first)
    assert [adapters.name_of(second) for _ in range(2)] == [None] * 2
    assert caplog.text.count("another adapter had its number 1") == 1
    assert adapters.name_of(first) == name
    reread = adapters.name_of(replace(second, load_inplace=True))
    assert None is not reread != name
    assert adapters.name_of(first) is None, "vLLM has the other one now"


def test_adapter_of_a_hub_is_named_by_its_files(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its name alone would be the same for all that is ever uploaded under it."""
    adapter = on_hub(monkeypatch, tmp_path / "hub", "org/adapter", "one")
    name = adapters.name_of(adapter)
    assert name == adapters.name_of(Adapter("a", str(make_adapter(tmp_path, "one", REVISION)), 2))
    elsewhere = on_hub(monkeypatch, tmp_path / "other pod's hub", "org/adapter", "uploaded later")
    assert None is not Adapters().name_of(elsewhere) != name
    assert adapters.name_of(elsewhere) is None, "vLLM does not read it again by itself"


@pytest.mark.parametrize("path", ["org/adapter", "no name of a hub/at/all", "~/nowhere"])
def test_adapter_whose_files_are_nowhere_has_no_name(
    adapters: Adapters,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    path: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for is_reread in (False, True):
        assert adapters.name_of(Adapter("a", path, load_inplace=is_reread)) is None
    assert caplog.text.count("are in no folder") == 1
    assert f"adapter=a path={path}" in caplog.text


def test_requests_of_an_adapter_that_is_replaced_meanwhile_lose_their_names(tmp_path: Path) -> None:
    """Another path under the same name, loaded in place: from then on vLLM computes with it for
    all requests of that number.
    """
    namer = RequestNamer(KVIdentity(METADATA, 1, 1), CHUNK_SIZE)
    namer.use_salt("")
    groups = groups_of(PLAIN)
    old = Adapter("a", str(make_adapter(tmp_path / "1", "one")))
    new = Adapter("a", str(make_adapter(tmp_path / "2", "two")), load_inplace=True)
    running, other = (
        RequestState(request_with(adapter, "r"), groups, CHUNK_SIZE) for adapter in (old, new)
    )
    plain = RequestState(request_of(), groups, CHUNK_SIZE)
    for state in (running, plain):
        assert namer.name(state) is not None
        assert namer.check(state)
    assert namer.name(other) is not None
    assert namer.name(running) is None
    assert not namer.check(running)
    for state in (other, plain):
        assert namer.name(state) is not None
        assert namer.check(state)


def test_many_adapters_are_forgotten_not_confused(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "MAX_ADAPTERS", 2)
    many = [
        Adapter(f"a{i}", str(make_adapter(tmp_path / str(i), f"weights {i}")), i + 1)
        for i in range(5)
    ]
    first = [adapters.name_of(adapter) for adapter in many]
    assert [adapters.name_of(adapter) for adapter in many] == first
    assert len(set(first)) == 5


def test_nothing_is_stored_once_the_files_of_an_adapter_have_changed(tmp_path: Path) -> None:
    """They change before vLLM loads them in place; no request need have come since."""
    adapter = Adapter("a", str(make_adapter(tmp_path, "one")))
    side = scheduler_side(ScriptedStore([None]))
    side.new_request(request_with(adapter, "r"))
    (stored,) = side.plan_stores(output_of([("r", (list(range(1, 5)),), 0, 16)]), ())
    assert stored.runs[0].num_chunks == 2
    make_adapter(tmp_path, "two epochs")
    assert side.plan_stores(output_of(again=[("r", (list(range(5, 9)),), 16, 16)]), ()) == ()


def test_adapter_that_is_downloaded_later_is_named(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert adapters.name_of(Adapter("a", "org/adapter")) is None
    assert adapters.name_of(on_hub(monkeypatch, tmp_path, "org/adapter", "one")) is not None


def test_adapter_in_the_users_folder_is_named(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    here = Adapter("a", str(make_adapter(tmp_path, "one")), 2)
    assert adapters.name_of(Adapter("a", "~/adapter")) == adapters.name_of(here) is not None
