"""Memory gets its pages before it is used."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
import threading
from pathlib import Path

import pytest
from lmcache_core.memory import populate as module
from lmcache_core.memory.populate import (
    BackgroundPopulation,
    allocate,
    memory_nodes,
    populate,
)

MB = 1 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture
def file(tmp_path):
    """A file of memory with something in it."""
    path = Path("/dev/shm") / f"{tmp_path.name}-{os.getpid()}"
    path.write_bytes(b"\x07" * 40 * MB)
    yield path
    path.unlink()


def mapped(path, writable):
    with path.open("r+b") as opened:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return memoryview(mmap.mmap(opened.fileno(), 0, mmap.MAP_SHARED, access))


def faults_of(call):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def touch(view):
    assert set(bytes(view[::PAGE])) <= {0, 7}


def wait_populated():
    for thread in threading.enumerate():
        if thread.name == "lmcache-populate":
            thread.join(60)
            assert not thread.is_alive()


def test_new_memory_has_its_pages():
    view = memoryview(mmap.mmap(-1, 40 * MB + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    populate(view)
    assert faults_of(lambda: view.__setitem__(slice(0, 40 * MB, PAGE), bytes(10240))) < 100


def test_existing_memory_is_mapped_in_the_background_and_keeps_its_content(file):
    views = mapped(file, writable=True), mapped(file, writable=False)
    for view in views:
        BackgroundPopulation(view)
    wait_populated()
    assert faults_of(lambda: [touch(view) for view in views]) < 1000  # 20,480 pages
    assert bytes(views[0]) == b"\x07" * 40 * MB
    assert faults_of(lambda: touch(mapped(file, writable=False))) > 500  # it would have had some


def test_a_population_that_is_stopped_ends_with_its_step(file, monkeypatch):
    steps, is_stopped = [], threading.Event()

    def step(*args):
        steps.append(args)
        assert is_stopped.wait(60)

    monkeypatch.setattr(module, "_populate", step)
    population = BackgroundPopulation(mapped(file, writable=True))
    population.stop()
    is_stopped.set()
    wait_populated()
    assert len(steps) == 1


def old_kernel(*_):
    raise OSError(errno.EINVAL, "Invalid argument")


def test_an_older_kernel_is_no_error(file, monkeypatch, caplog):
    monkeypatch.setattr(module, "_populate", old_kernel)
    caplog.set_level(logging.DEBUG)
    BackgroundPopulation(mapped(file, writable=True))
    wait_populated()
    assert "pages ahead: error=[Errno 22]" in caplog.text
    view = memoryview(mmap.mmap(-1, 70 * MB + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    populate(view)
    assert faults_of(lambda: touch(view)) < 1000


def test_a_lack_of_memory_is_an_error():
    """A write to this memory would be a SIGBUS."""
    fd = os.memfd_create("short")
    os.ftruncate(fd, MB)
    view = memoryview(mmap.mmap(fd, MB, mmap.MAP_SHARED))
    os.ftruncate(fd, 0)
    os.close(fd)
    with pytest.raises(OSError, match="No space left on device"):
        populate(view)


@pytest.fixture
def two_sockets(tmp_path, monkeypatch):
    """A machine with memory at two of three nodes; what each thread was bound to."""
    for node, processors in (("node0", "0-1"), ("node1", "2-3,6"), ("node2", "4")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(f"{processors}\n")
    (tmp_path / "has_memory").write_text("0-1\n")
    bound: dict[str, frozenset[int]] = {}
    monkeypatch.setattr(module, "NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    monkeypatch.setattr(
        os,
        "sched_setaffinity",
        lambda who, to: bound.update({threading.current_thread().name: frozenset(to)}),
    )
    return bound


def test_blocks_of_an_arena_are_spread_over_memory_nodes(two_sockets, monkeypatch, tmp_path):
    assert memory_nodes() == [{0, 1}, {2, 3}], "processors that this process may use"
    monkeypatch.setattr(module, "STEP_BYTES", PAGE)
    ready, allocated = threading.Barrier(4), []

    def fallocate(fd, at, length):
        if len(allocated) < 4:
            ready.wait(60)  # so that every thread has one
        allocated.append((at, length, two_sockets[threading.current_thread().name]))

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with (tmp_path / "arena").open("wb") as file:
        allocate(file.fileno(), 4 * PAGE - 7)
    assert sorted((at, length) for at, length, _ in allocated) == [
        (0, PAGE), (PAGE, PAGE), (2 * PAGE, PAGE), (3 * PAGE, PAGE - 7)
    ]  # fmt: skip
    assert sorted(sorted(node) for _, _, node in allocated) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert threading.main_thread().name not in two_sockets


def test_one_node_needs_no_threads(two_sockets, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with (tmp_path / "arena").open("wb") as file:
        allocate(file.fileno(), 3 * MB)
    assert (tmp_path / "arena").stat().st_size == 3 * MB
    assert two_sockets == {}
    monkeypatch.setattr(module, "NODES", tmp_path / "nowhere")
    assert memory_nodes() == []


def test_an_arena_is_made_where_threads_may_not_be_bound(two_sockets, monkeypatch, tmp_path):
    def denied(who, to):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", denied)
    with (tmp_path / "arena").open("wb") as file:
        allocate(file.fileno(), 3 * MB)
    assert (tmp_path / "arena").stat().st_size == 3 * MB
