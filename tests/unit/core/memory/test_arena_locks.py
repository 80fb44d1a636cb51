"""Locks that show which processes may still write to an arena."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.memory.arena_locks import (
    begin_generation,
    forget_generation,
    generation_path,
    generations_in,
    is_over,
    join_generation,
    own_directory,
)


def test_a_generation_without_a_file_is_not_over_and_cannot_be_joined(tmp_path):
    assert not is_over(tmp_path, 3)
    with pytest.raises(UnavailableError):
        join_generation(tmp_path, 3)
    begin_generation(tmp_path, 3, 0o660)
    forget_generation(tmp_path, 3)
    forget_generation(tmp_path, 3)
    assert not is_over(tmp_path, 3)
    assert generations_in(tmp_path) == []


def test_a_link_is_not_joined(tmp_path):
    (tmp_path / "elsewhere").write_text("")
    generation_path(tmp_path, 4).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnavailableError):
        join_generation(tmp_path, 4)


HOLD = """
import os, sys, time
from pathlib import Path
from lmcache_core.memory.arena_locks import join_generation
lock = join_generation(Path(sys.argv[1]), 1)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_generation_is_over_when_its_last_client_is_gone_not_while_it_is_stopped(tmp_path):
    begin_generation(tmp_path, 1, 0o660)
    assert is_over(tmp_path, 1)
    mine = join_generation(tmp_path, 1)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as client:
        assert client.stdout.readline() == b"held\n"
        client.send_signal(signal.SIGSTOP)
        assert not is_over(tmp_path, 1)
        client.kill()
        client.wait()
        assert not is_over(tmp_path, 1)
        mine.release()
        mine.release()
        assert is_over(tmp_path, 1)


def test_a_forked_child_neither_ends_nor_keeps_the_lock_of_its_parent(tmp_path):
    begin_generation(tmp_path, 1, 0o660)
    program = """
import os, sys
from pathlib import Path
from lmcache_core.memory.arena_locks import is_over, join_generation
where = Path(sys.argv[1])
lock = join_generation(where, 1)
for releases in (True, False):
    child = os.fork()
    if child == 0:
        if releases:
            lock.release()
            os._exit(0)
        sys.stdin.read()  # lives on, with the file open
        os._exit(0)
    if releases:
        os.waitpid(child, 0)
        assert not is_over(where, 1), "a child has ended its parent's lock"
lock.release()
assert is_over(where, 1), "a child keeps its parent's lock"
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], input=b"", check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr


def test_only_files_of_that_name_are_generations(tmp_path):
    for name in ("x.generation", "1.generation", f"{-1:016x}.generation", "kv.arena", f"{5:016x}"):
        (tmp_path / name).write_text("")
    begin_generation(tmp_path, 0xABC, 0o660)
    assert generations_in(tmp_path) == [0xABC]


def test_a_directory_is_owned_once(tmp_path):
    first = own_directory(tmp_path / "new")
    with pytest.raises(ConfigError, match="another sidecar"):
        own_directory(tmp_path / "new")
    first.release()
    own_directory(tmp_path / "new").release()
