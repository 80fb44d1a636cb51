from __future__ import annotations

import mmap
import os
import stat
import subprocess
import sys

import pytest
from lmcache_core.errors import CapacityError, ConfigError, UnavailableError
from lmcache_core.memory import ArenaAllocator, attach_shared_arena, create_shared_arena
from lmcache_core.memory.shared import FILE_SUFFIX, unlink_shared_arena

SIZE = 4 * mmap.PAGESIZE


def test_what_a_client_stores_the_sidecar_loads(tmp_path):
    made = create_shared_arena(tmp_path / "volume", SIZE)
    client = attach_shared_arena(made.path, made.size, made.generation)
    assert (client.path, client.size, client.generation) == (made.path, made.size, made.generation)
    client.store_view[100:105] = b"hello"
    assert bytes(made.load_view[100:105]) == bytes(client.load_view[100:105]) == b"hello"
    made.store_view[-1] = 7
    assert client.load_view[-1] == 7


def test_another_process_sees_the_same_bytes(tmp_path):
    made = create_shared_arena(tmp_path, SIZE)
    program = f"""
from pathlib import Path
from lmcache_core.memory import attach_shared_arena
arena = attach_shared_arena(Path({str(made.path)!r}), {made.size}, {made.generation})
arena.store_view[:6] = b"client"
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert bytes(made.load_view[:6]) == b"client"


def test_the_view_for_loads_cannot_be_written(tmp_path):
    made = create_shared_arena(tmp_path, SIZE)
    client = attach_shared_arena(made.path, made.size, made.generation)
    for arena in (made, client):
        assert arena.load_view.readonly
        assert not arena.store_view.readonly
        with pytest.raises(TypeError):
            arena.load_view[0] = 1


def test_the_whole_file_is_allocated_before_anyone_maps_it(tmp_path):
    made = create_shared_arena(tmp_path, 1 << 20)
    status = made.path.stat()
    assert status.st_size == made.size == 1 << 20
    assert status.st_blocks * 512 >= made.size
    assert not any(made.load_view)


def test_sizes_are_rounded_up_to_pages(tmp_path):
    made = create_shared_arena(tmp_path, mmap.PAGESIZE + 1)
    assert made.size == len(made.load_view) == len(made.store_view) == 2 * mmap.PAGESIZE


def test_only_owner_and_group_may_open_the_file(tmp_path):
    made = create_shared_arena(tmp_path, SIZE, mode=0o600)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    assert not stat.S_IMODE(create_shared_arena(tmp_path, SIZE).path.stat().st_mode) & 0o007


def test_a_new_generation_is_a_new_file_and_leaves_the_old_mapping_alone(tmp_path):
    (tmp_path / "not-an-arena").write_text("kept")
    old = create_shared_arena(tmp_path, SIZE)
    client = attach_shared_arena(old.path, old.size, old.generation)
    path, size, generation = old.path, old.size, old.generation
    del old  # what owns it is gone, as after a crash
    new = create_shared_arena(tmp_path, SIZE)
    assert new.generation != generation
    assert list(tmp_path.glob(f"*{FILE_SUFFIX}")) == [new.path]
    assert (tmp_path / "not-an-arena").read_text() == "kept"
    client.store_view[:3] = b"old"
    assert bytes(new.load_view[:3]) == bytes(3)
    with pytest.raises(UnavailableError):
        attach_shared_arena(path, size, generation)


def test_the_arena_of_a_living_sidecar_is_left_alone(tmp_path):
    program = f"""
import sys
from pathlib import Path
from lmcache_core.memory import create_shared_arena
arena = create_shared_arena(Path({str(tmp_path)!r}), {SIZE})
print(arena.path, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        path = tmp_path / other.stdout.readline().strip()
        mine = create_shared_arena(tmp_path, SIZE)
        assert path.exists()
        other.kill()
        other.wait()
    next_one = create_shared_arena(tmp_path, SIZE)
    assert not path.exists(), "the file of a killed sidecar goes at the next start"
    assert mine.path.exists()
    assert next_one.path.exists()


def test_permissions_do_not_depend_on_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        made = create_shared_arena(tmp_path, SIZE)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o660


def test_links_are_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("keep me")
    (tmp_path / f"x{FILE_SUFFIX}").symlink_to(target)
    create_shared_arena(tmp_path, SIZE)
    assert target.read_text() == "keep me"


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="arena_path"):
        create_shared_arena(tmp_path / "file" / "arena", SIZE)


def test_an_unlinked_arena_stays_mapped(tmp_path):
    made = create_shared_arena(tmp_path, SIZE)
    unlink_shared_arena(made)
    unlink_shared_arena(made)
    made.store_view[0] = 9
    assert made.load_view[0] == 9
    assert list(tmp_path.iterdir()) == []


def test_a_volume_that_is_too_small_is_named_and_left_empty(tmp_path):
    with pytest.raises(CapacityError, match="arena_gb"):
        create_shared_arena(tmp_path, 1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_file_sizes_is_a_capacity_error_too(tmp_path):
    program = f"""
import resource, signal, sys
from pathlib import Path
from lmcache_core.errors import CapacityError
from lmcache_core.memory import create_shared_arena
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    create_shared_arena(Path({str(tmp_path)!r}), 1 << 20)
except CapacityError:
    sys.exit(0)
sys.exit("no CapacityError")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, -1])
def test_an_arena_has_at_least_one_byte(tmp_path, size):
    with pytest.raises(ValueError, match="size"):
        create_shared_arena(tmp_path, size)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_absent_or_too_short_is_unavailable(tmp_path):
    with pytest.raises(UnavailableError, match="absent"):
        attach_shared_arena(tmp_path / "absent.arena", SIZE, 1)
    made = create_shared_arena(tmp_path, SIZE)
    with pytest.raises(UnavailableError, match=str(SIZE)):
        attach_shared_arena(made.path, SIZE + 1, made.generation)


def test_no_file_descriptor_is_left_open(tmp_path):
    def num_open():
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a Path would hold one open)

    made = create_shared_arena(tmp_path, SIZE)
    before = num_open()
    for _ in range(5):
        with pytest.raises(UnavailableError):
            attach_shared_arena(made.path, SIZE + 1, made.generation)
        with pytest.raises(CapacityError):
            create_shared_arena(tmp_path / "other", 1 << 60)
    assert num_open() == before


def test_an_allocator_cuts_the_writable_view(tmp_path):
    made = create_shared_arena(tmp_path, SIZE)
    allocator = ArenaAllocator(made.store_view)
    with allocator.allocate((2, 100), "float16") as obj:
        obj.byte_array[:] = b"\x01" * 400
        assert bytes(made.load_view[obj.metadata.address : obj.metadata.address + 400]) == b"\x01" * 400
    allocator.check_integrity()
