"""A model of Redis: the commands that our scripts and services use, scripts in real Lua 5.1.

The contract suite of its commands runs against a real Redis too.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

import lupa.lua51 as lua51

from tests.simulation import threads


class ReplyError(Exception):
    """An error reply."""


class Status(bytes):
    """A status reply, such as OK."""


OK = Status(b"OK")
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
Reply = Any
Words = list[bytes]


class Store:
    """Keys and values; commands are methods of their names in lower case."""

    def __init__(self) -> None:
        self.values: dict[bytes, Any] = {}
        self.expires_ms: dict[bytes, int] = {}
        self._scripts: dict[bytes, bytes] = {}
        self._functions: dict[bytes, Any] = {}
        self._lua: Any = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._set_up_lua()

    def execute(self, words: Words) -> Reply:
        """Run a command.

        Raises:
            ReplyError: What Redis answers instead.
        """
        name = words[0].decode().lower()
        command: Callable[..., Reply] | None = getattr(self, f"do_{name}", None)
        if command is None:
            raise ReplyError(f"ERR unknown command '{name}'")
        return command(*words[1:])

    def _now_ms(self) -> int:
        return int(threads._wall() * 1000)

    def _get(self, key: bytes, kind: type) -> Any:
        if self.expires_ms.get(key, 1 << 62) <= self._now_ms():
            self._drop(key)
        value = self.values.get(key)
        if value is not None and type(value) is not kind:
            raise ReplyError(WRONG_TYPE)
        return value

    def _make(self, key: bytes, kind: type) -> Any:
        value = self._get(key, kind)
        if value is None:
            value = self.values[key] = kind()
        return value

    def _drop(self, key: bytes) -> int:
        self.expires_ms.pop(key, None)
        return int(self.values.pop(key, None) is not None)

    def _drop_empty(self, key: bytes) -> None:
        if not self.values.get(key):
            self._drop(key)

    # --- Connections -----------------------------------------------------------------------------

    def do_ping(self) -> Reply:
        return Status(b"PONG")

    def do_client(self, *_: bytes) -> Reply:
        return OK

    def do_info(self, *_: bytes) -> Reply:
        return b"# Server\r\nrun_id:simulated\r\nredis_mode:standalone\r\nrole:master\r\n"

    def do_time(self) -> Reply:
        micros = int(threads._wall() * 1e6)
        return [b"%d" % (micros // 1_000_000), b"%d" % (micros % 1_000_000)]

    # --- Keys ------------------------------------------------------------------------------------

    def do_get(self, key: bytes) -> Reply:
        return self._get(key, bytes)

    def do_set(self, key: bytes, value: bytes) -> Reply:
        self._drop(key)
        self.values[key] = value
        return OK

    def do_del(self, *keys: bytes) -> Reply:
        return sum(self._drop(key) for key in keys)

    do_unlink = do_del

    def do_exists(self, *keys: bytes) -> Reply:
        now_ms = self._now_ms()
        return sum(
            key in self.values and self.expires_ms.get(key, 1 << 62) > now_ms for key in keys
        )

    def do_incr(self, key: bytes) -> Reply:
        number = int(self._get(key, bytes) or b"0") + 1
        self.values[key] = b"%d" % number
        return number

    def do_pexpire(self, key: bytes, ms: bytes) -> Reply:
        if key not in self.values:
            return 0
        self.expires_ms[key] = self._now_ms() + int(ms)
        return 1

    def do_pttl(self, key: bytes) -> Reply:
        if not self.do_exists(key):
            return -2
        return self.expires_ms[key] - self._now_ms() if key in self.expires_ms else -1

    def do_persist(self, key: bytes) -> Reply:
        return int(self.expires_ms.pop(key, None) is not None)

    # --- Hashes ----------------------------------------------------------------------------------

    def do_hset(self, key: bytes, *pairs: bytes) -> Reply:
        value = self._make(key, dict)
        before = len(value)
        value.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(value) - before

    def do_hget(self, key: bytes, field: bytes) -> Reply:
        return (self._get(key, dict) or {}).get(field)

    def do_hmget(self, key: bytes, *fields: bytes) -> Reply:
        value = self._get(key, dict) or {}
        return [value.get(field) for field in fields]

    def do_hgetall(self, key: bytes) -> Reply:
        return [part for pair in (self._get(key, dict) or {}).items() for part in pair]

    def do_hkeys(self, key: bytes) -> Reply:
        return list(self._get(key, dict) or {})

    def do_hlen(self, key: bytes) -> Reply:
        return len(self._get(key, dict) or {})

    def do_hexists(self, key: bytes, field: bytes) -> Reply:
        return int(field in (self._get(key, dict) or {}))

    def do_hdel(self, key: bytes, *fields: bytes) -> Reply:
        value = self._get(key, dict) or {}
        count = sum(value.pop(field, None) is not None for field in fields)
        self._drop_empty(key)
        return count

    def do_hincrby(self, key: bytes, field: bytes, by: bytes) -> Reply:
        value = self._make(key, dict)
        number = int(value.get(field, b"0")) + int(by)
        value[field] = b"%d" % number
        return number

    def do_hrandfield(self, key: bytes) -> Reply:
        value = self._get(key, dict)
        return threads.kernel.random.choice(list(value)) if value else None

    def do_hscan(self, key: bytes, cursor: bytes, _: bytes, count: bytes) -> Reply:
        fields = list(self._get(key, dict) or {})
        end = int(cursor) + int(count)
        value = self.values.get(key, {})
        found = [part for field in fields[int(cursor) : end] for part in (field, value[field])]
        return [b"%d" % (end if end < len(fields) else 0), found]

    # --- Sets ------------------------------------------------------------------------------------

    def do_sadd(self, key: bytes, *members: bytes) -> Reply:
        return self.do_hset(key, *(part for one in members for part in (one, b"")))

    def do_smembers(self, key: bytes) -> Reply:
        return self.do_hkeys(key)

    def do_srem(self, key: bytes, *members: bytes) -> Reply:
        return self.do_hdel(key, *members)

    def do_zadd(self, key: bytes, *pairs: bytes) -> Reply:
        value = self._make(key, dict)
        before = len(value)
        for score, member in zip(pairs[::2], pairs[1::2], strict=True):
            value[member] = float(score)
        return len(value) - before

    def do_zrem(self, key: bytes, *members: bytes) -> Reply:
        return self.do_hdel(key, *members)

    def do_zrangebyscore(self, key: bytes, least: bytes, largest: bytes, *limit: bytes) -> Reply:
        def bound(text: bytes) -> tuple[float, bool]:
            return float(text.lstrip(b"(")), text.startswith(b"(")

        (low, skips_low), (high, skips_high) = bound(least), bound(largest)
        found = [
            member
            for score, member in sorted(
                (score, member) for member, score in (self._get(key, dict) or {}).items()
            )
            if (score > low if skips_low else score >= low)
            and (score < high if skips_high else score <= high)
        ]
        if limit:
            found = found[int(limit[1]) :][: int(limit[2])]
        return found

    # --- Scripts ---------------------------------------------------------------------------------

    def do_eval(self, text: bytes, count: bytes, *words: bytes) -> Reply:
        digest = hashlib.sha1(text).hexdigest().encode()
        self._scripts[digest] = text
        return self.do_evalsha(digest, count, *words)

    def do_evalsha(self, digest: bytes, count: bytes, *words: bytes) -> Reply:
        text = self._scripts.get(digest)
        if text is None:
            raise ReplyError("NOSCRIPT No matching script. Please use EVAL.")
        function = self._functions.get(digest)
        if function is None:
            function = self._lua.eval(b"function(KEYS, ARGV) " + text + b"\nend")
            self._functions[digest] = function
        num = int(count)
        try:
            return self._reply_of(function(self._table(words[:num]), self._table(words[num:])))
        except lua51.LuaError as exc:
            raise ReplyError(f"ERR {exc}".replace("\n", " ")) from exc

    def _table(self, words: Any) -> Any:
        return self._lua.table_from(list(words))

    def _set_up_lua(self) -> None:
        def call(*words: Any) -> Any:
            return self._lua_of(self.execute([_word(word) for word in words]))

        def protected_call(*words: Any) -> Any:
            try:
                return call(*words)
            except ReplyError as exc:
                return self._lua.table_from({b"err": str(exc).encode()})

        null = object()
        globals_ = self._lua.globals()
        globals_.redis = self._lua.table_from({b"call": call, b"pcall": protected_call})
        globals_.cjson = self._lua.table_from(
            {
                b"encode": lambda value: json.dumps(
                    self._json_of(value, null), separators=(",", ":")
                ).encode(),
                b"decode": lambda text: self._of_json(json.loads(text), null),
                b"null": null,
            }
        )
        globals_.struct = self._lua.table_from(
            {
                b"pack": lambda form, *values: struct.pack(_form(form), *map(int, values)),
                b"unpack": lambda form, data: (
                    *struct.unpack_from(_form(form), data),
                    struct.calcsize(_form(form)) + 1,
                ),
            }
        )

    def _lua_of(self, reply: Reply) -> Any:
        if reply is None:
            return False
        if isinstance(reply, Status):
            return self._lua.table_from({b"ok": bytes(reply)})
        if isinstance(reply, list):
            return self._lua.table_from([self._lua_of(one) for one in reply])
        return reply

    def _reply_of(self, value: Any) -> Reply:
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if isinstance(value, float):
            return int(value)
        if isinstance(value, int | bytes):
            return value
        if value[b"err"] is not None:
            raise ReplyError(value[b"err"].decode())
        if value[b"ok"] is not None:
            return Status(value[b"ok"])
        found = []
        while (one := value[len(found) + 1]) is not None:
            found.append(self._reply_of(one))
        return found

    def _json_of(self, value: Any, null: object) -> Any:
        if value is null or value is None or isinstance(value, bool):
            return None if value is null else value
        if isinstance(value, bytes):
            return value.decode("latin-1")
        if isinstance(value, int | float):
            return int(value) if value == int(value) else value
        keys = list(value.keys())
        if keys == list(range(1, len(keys) + 1)):
            return [self._json_of(value[key], null) for key in keys]
        return {key.decode(): self._json_of(value[key], null) for key in keys}

    def _of_json(self, value: Any, null: object) -> Any:
        if value is None:
            return null
        if isinstance(value, str):
            return value.encode("latin-1")
        if isinstance(value, list):
            return self._lua.table_from([self._of_json(one, null) for one in value])
        if isinstance(value, dict):
            return self._lua.table_from(
                {key.encode(): self._of_json(one, null) for key, one in value.items()}
            )
        return value


def _word(word: Any) -> bytes:
    if isinstance(word, bytes):
        return word
    if isinstance(word, int) or word == int(word):
        return b"%d" % int(word)
    return f"{word:.17g}".encode()


def _form(form: bytes) -> str:
    return form.decode().replace("I4", "I").replace("I8", "Q")


def encode(reply: Reply) -> bytes:
    """Return a reply in RESP2."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, ReplyError):
        return b"-%s\r\n" % str(reply).encode()
    if isinstance(reply, Status):
        return b"+%s\r\n" % bytes(reply)
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%s\r\n" % (len(reply), reply)
    return b"*%d\r\n" % len(reply) + b"".join(map(encode, reply))


class _Connection(asyncio.Protocol):
    def __init__(self, store: Store) -> None:
        self._store = store
        self._received = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (words := self._next_command()) is not None:
            try:
                reply = self._store.execute(words)
            except ReplyError as exc:
                reply = exc
            self._transport.write(encode(reply))

    def _next_command(self) -> Words | None:
        data = self._received
        line_end = data.find(b"\r\n")
        if line_end < 0:
            return None
        words, at = [], line_end + 2
        for _ in range(int(data[1:line_end])):
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                return None
            begin, size = line_end + 2, int(data[at + 1 : line_end])
            at = begin + size + 2
            if at > len(data):
                return None
            words.append(data[begin : begin + size])
        self._received = data[at:]
        return words


class RedisServer:
    """What Redis keeps outlives its process: a restart finds it, as with a synced append-only file.

    `flush` forgets it, as a restart without a file does.
    """

    def __init__(self) -> None:
        self.store = Store()

    def flush(self) -> None:
        """Forget everything but the scripts."""
        self.store.values.clear()
        self.store.expires_ms.clear()

    def main(self) -> int:
        """Serve port 6379 until the process ends."""
        asyncio.run(self._serve())
        return 0

    async def _serve(self) -> None:
        listening = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self.store), "0.0.0.0", 6379
        )
        await listening.serve_forever()
