"""The file of an arena that a sidecar and its clients share."""

from __future__ import annotations

import mmap
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from lmcache_core.errors import CapacityError, ConfigError, UnavailableError
from lmcache_core.memory import attach_shared_arena, shared
from lmcache_core.memory.arena_locks import generation_path, generations_in, own_directory
from lmcache_core.memory.shared import ArenaFile, unlink_shared_arena

from tests.fixtures.shared_arena import create_shared_arena

SIZE = 4 * mmap.PAGESIZE


def test_client_and_sidecar_see_the_same_bytes(tmp_path):
    made = create_shared_arena(tmp_path / "volume", SIZE - 1)
    assert made.size == SIZE == made.path.stat().st_size, "whole pages"
    assert made.path.stat().st_blocks * 512 >= SIZE, "allocated before anything maps it"
    assert not any(made.load_view)
    client = attach_shared_arena(made.path, made.size, made.generation)
    assert (client.path, client.size, client.generation) == (made.path, made.size, made.generation)
    client.store_view[100:105] = b"hello"
    assert bytes(made.load_view[100:105]) == bytes(client.load_view[100:105]) == b"hello"
    made.store_view[-1] = 7
    assert client.load_view[-1] == 7
    unlink_shared_arena(made)
    unlink_shared_arena(made)
    assert client.load_view[-1] == 7
    assert list((tmp_path / "volume").iterdir()) == []


def test_a_new_file_leaves_the_old_mapping_alone(tmp_path):
    (tmp_path / "not-an-arena").write_text("kept")
    old = create_shared_arena(tmp_path, SIZE)
    client = attach_shared_arena(old.path, old.size, old.generation)
    old.lock.release()
    new = create_shared_arena(tmp_path, SIZE)
    assert new.generation != old.generation
    assert new.inode != old.inode
    assert generations_in(tmp_path) == [new.generation]
    assert (tmp_path / "not-an-arena").read_text() == "kept"
    client.store_view[:3] = b"old"
    assert bytes(new.load_view[:3]) == bytes(3)
    with pytest.raises(UnavailableError):
        attach_shared_arena(old.path, old.size, old.generation)


def reopened(directory, size=SIZE, **options):
    """Return the arena of the next start; None if that would make a new one."""
    return ArenaFile(directory, size, **options).reopen(own_directory(directory))


def test_the_next_start_finds_the_same_bytes_in_a_new_generation(tmp_path):
    old = create_shared_arena(tmp_path, SIZE)
    client = attach_shared_arena(old.path, old.size, old.generation)
    client.store_view[7:12] = b"bytes"
    old.lock.release()
    new = reopened(tmp_path, mode=0o600)
    assert (new.path, new.size, new.inode) == (old.path, old.size, old.inode)
    assert new.generation != old.generation
    assert bytes(new.load_view[7:12]) == b"bytes"
    assert stat.S_IMODE(new.path.stat().st_mode) == 0o600
    assert set(generations_in(tmp_path)) == {old.generation, new.generation}
    new.store_view[0] = 1
    assert client.load_view[0] == 1


def spoil_size(path):
    with path.open("ab") as file:
        file.write(b"x")


def spoil_holes(path):
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def spoil_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def spoil_second_name(path):
    path.with_name("second").hardlink_to(path)


def spoil_kind(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil", [spoil_size, spoil_holes, spoil_link, spoil_second_name, spoil_kind, os.unlink]
)
def test_a_file_that_is_not_as_it_was_made_is_not_reused(tmp_path, spoil):
    made = create_shared_arena(tmp_path, SIZE)
    made.lock.release()
    spoil(made.path)
    lock = own_directory(tmp_path)
    assert ArenaFile(tmp_path, SIZE).reopen(lock) is None
    again = ArenaFile(tmp_path, SIZE).create(lock)
    assert stat.S_ISREG(again.path.lstat().st_mode)
    assert generations_in(tmp_path) == [again.generation]


def test_a_file_of_another_user_is_not_reused(tmp_path, monkeypatch):
    create_shared_arena(tmp_path, SIZE).lock.release()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert reopened(tmp_path) is None


def test_a_file_of_another_size_is_not_reused(tmp_path):
    create_shared_arena(tmp_path, SIZE).lock.release()
    lock = own_directory(tmp_path)
    assert ArenaFile(tmp_path, 2 * SIZE).reopen(lock) is None
    assert ArenaFile(tmp_path, SIZE - 1).reopen(lock).size == SIZE, (
        "sizes are compared in whole pages"
    )


def kernel(tmp_path, monkeypatch, machine, volume):
    """Let the kernel have these policies for huge pages of all volumes and of tmp_path's."""
    device = tmp_path.stat().st_dev
    at = f"{os.major(device)}:{os.minor(device)}"
    (tmp_path / "shmem_enabled").write_text(machine)
    (tmp_path / "mountinfo").write_text(
        "22 28 0:999 / /proc rw,nosuid - proc proc rw,huge=always\n"
        f"38 24 {at} / /dev/shm rw,nosuid shared:2 - tmpfs tmpfs rw,size=64k{volume}\n"
    )
    monkeypatch.setattr(shared, "SHMEM_ENABLED", tmp_path / "shmem_enabled")
    monkeypatch.setattr(shared, "MOUNTS", tmp_path / "mountinfo")


def num_advised(path):
    """Return how many mappings of this file in this process are advised to have huge pages."""
    text = Path("/proc/self/smaps").read_text()
    regions = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)
    flags = [region.partition("VmFlags:")[2].split() for region in regions if str(path) in region]
    return sum("hg" in each for each in flags)


DEFAULT = "always within_size advise [never] deny force"


@pytest.mark.parametrize(
    ("machine", "volume", "asked", "policy", "is_used"),
    [
        (DEFAULT, ",huge=within_size,a=b", None, "within_size", True),
        ("[always] within_size advise never deny force", "", None, "never", False),
        ("always within_size advise never [deny] force", ",huge=always", None, "deny", False),
        ("always within_size advise never deny [force]", "", None, "force", True),
        (DEFAULT, "", True, "never", True),
        (DEFAULT, ",huge=advise", False, "advise", False),
    ],
)
def test_setting_then_machine_then_volume_decide_on_huge_pages(
    tmp_path, monkeypatch, machine, volume, asked, policy, is_used
):
    kernel(tmp_path, monkeypatch, machine, volume)
    assert shared.huge_page_policy(tmp_path) == policy
    made = create_shared_arena(tmp_path / "arena", SIZE, huge_pages=asked)
    assert made.huge_pages == is_used
    assert num_advised(made.path) == 2 * is_used
    made.lock.release()
    again = reopened(tmp_path / "arena", huge_pages=asked)
    assert again.huge_pages == is_used
    assert num_advised(again.path) == 4 * is_used


def test_a_full_volume_and_a_limit_on_file_sizes_are_capacity_errors(tmp_path):
    with pytest.raises(CapacityError, match="arena_gb"):
        create_shared_arena(tmp_path, 1 << 60)
    assert list(tmp_path.iterdir()) == []
    program = f"""
import resource, signal, sys
from pathlib import Path
from lmcache_core.errors import CapacityError
from tests.fixtures.shared_arena import create_shared_arena
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


def test_an_absent_or_short_file_is_unavailable(tmp_path):
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


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="arena_path"):
        create_shared_arena(tmp_path / "file" / "arena", SIZE)


def test_the_view_for_loads_cannot_be_written(tmp_path):
    made = create_shared_arena(tmp_path, SIZE)
    client = attach_shared_arena(made.path, made.size, made.generation)
    for arena in (made, client):
        assert not arena.store_view.readonly
        with pytest.raises(TypeError):
            arena.load_view[0] = 1


def test_permissions_do_not_depend_on_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        made = create_shared_arena(tmp_path, SIZE)
    finally:
        os.umask(before)
    for path in (made.path, generation_path(tmp_path, made.generation)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660, "only owner and group"


def test_a_kernel_without_huge_pages_is_not_asked_for_them(tmp_path, monkeypatch):
    kernel(tmp_path, monkeypatch, "", ",huge=advise")
    (tmp_path / "shmem_enabled").unlink()
    assert shared.huge_page_policy(tmp_path) == "never"
    (tmp_path / "shmem_enabled").write_text(DEFAULT)
    (tmp_path / "mountinfo").unlink()
    assert shared.huge_page_policy(tmp_path) == "never"
