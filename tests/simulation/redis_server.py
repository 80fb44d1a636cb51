"""A model of Redis 6.2: the commands that our scripts and services use, scripts in real Lua 5.1.

`test_redis_model` sends the same commands to it and to a real server. Unused commands, options and
formats are refused, so that a new use is noticed at once.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import json
import math
import random
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import lupa.lua51 as lua51  # type: ignore[import-untyped]

from tests.simulation import threads

PORT = 6379
VERSION = b"6.2.14"
MIN_INTEGER, MAX_INTEGER = -(1 << 63), (1 << 63) - 1


class ReplyError(Exception):
    """An error reply; its text is Latin-1, one character per byte."""


class Status(bytes):
    """A status reply, such as OK."""


class Text(bytes):
    """A text for people: a verbatim string in RESP3."""


class Pairs(list[Any]):
    """Alternating names and values: a map in RESP3."""


class Members(list[Any]):
    """Members of a set, which has its own type in RESP3."""


class Hash(dict[bytes, bytes]):
    """A hash, with its fields in order of insertion."""


class Set(dict[bytes, bytes]):
    """A set: its members, with empty values."""


class SortedSet(dict[bytes, float]):
    """A sorted set: the scores of its members."""


OK = Status(b"OK")
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
NO_INTEGER = "ERR value is not an integer or out of range"
NO_ARGUMENTS = "ERR wrong number of arguments for '{}' command"
NO_SCRIPT = "NOSCRIPT No matching script. Please use EVAL."
NOT_IN_SCRIPTS = frozenset({"config", "eval", "evalsha", "replicaof", "script"})
FILLING = frozenset({"hincrby", "hset", "sadd", "set", "zadd"})
"""Commands that may take memory."""
WRITING = FILLING | {"del", "flushall", "hdel", "persist", "pexpire", "unlink", "zrem"}
FULL = "OOM command not allowed when used memory > 'maxmemory'."
READ_ONLY = "READONLY You can't write against a read only replica."
DEFAULT_SCAN_COUNT = 10
Reply = Any
Words = list[bytes]
T = TypeVar("T", bytes, Hash, Set, SortedSet)


class Store:
    """Keys and values; each command is the method with its name in lower case.

    Args:
        clock: The wall-clock time in seconds, read once for each command.
        dice: Makes Redis' random choices.
    """

    def __init__(self, clock: Callable[[], float], dice: random.Random) -> None:
        self._clock = clock
        self._dice = dice
        self._now_s = 0.0
        self._values: dict[bytes, bytes | Hash | Set | SortedSet] = {}
        self._ends_ms: dict[bytes, int] = {}
        self._num_clients = 0
        self._is_full = self._is_replica = self._has_written = False
        self._known: set[str] = set()
        self._functions: dict[str, Any] = {}
        self._commands = dict(_commands_of(self))
        self._lua: Any = lua51.LuaRuntime(
            encoding=None, register_eval=False, register_builtins=False
        )
        self._compile, self._run = self._lua.execute(
            _PRELUDE, self._call_from_lua, self._decode_json, _json_of
        )
        self.restart()

    def restart(self) -> None:
        """Forget what only the process's memory holds: scripts, and its identity."""
        self._known.clear()
        self._run_id = b"%040x" % self._dice.getrandbits(160)

    def copy(self) -> Callable[[], None]:
        """Return a function that brings back the values of now."""
        values, ends_ms = copy.deepcopy(self._values), dict(self._ends_ms)

        def restore() -> None:
            self._values, self._ends_ms = copy.deepcopy(values), dict(ends_ms)

        return restore

    def damage(self, prefix: bytes, dice: random.Random) -> None:
        """Replace a value by one with a wrong bit, a part of it, that of another key, or a hash."""
        whole = {
            name: value
            for name, value in self._values.items()
            if isinstance(value, bytes) and value and name.startswith(prefix)
        }
        if not whole:
            return
        (name, value), other = dice.choice(list(whole.items())), dice.choice(list(whole))
        wrong = bytearray(value)
        wrong[dice.randrange(len(wrong))] ^= 1 << dice.randrange(8)
        damaged: list[bytes | Hash] = [
            bytes(wrong),
            value[: dice.randrange(len(value))],
            whole[other],
            Hash({b"f": b"v"}),
        ]
        self._values[name] = dice.choice(damaged)

    def number_client(self) -> int:
        """Return the number of a new connection."""
        self._num_clients += 1
        return self._num_clients

    def execute(self, words: Words) -> Reply:
        """Run a command.

        Raises:
            ReplyError: Redis' error reply.
        """
        self._now_s = self._clock()
        self._has_written = False
        return self._execute(words)

    def _execute(self, words: Sequence[bytes]) -> Reply:
        name = words[0].decode("latin-1").lower()
        if name not in self._commands:
            raise ReplyError(f"ERR unknown command `{name}`, with args beginning with: ")
        least, most, command = self._commands[name]
        if not least <= len(words) - 1 <= most:
            raise ReplyError(NO_ARGUMENTS.format(name))
        if refusal := self._refusal(name):
            raise ReplyError(refusal)
        return command(*words[1:])

    def _refusal(self, name: str) -> str:
        """Return why a command is refused: it takes memory, and no earlier one of its script has
        written, or it writes; "" if it is not.
        """
        if self._is_full and name in FILLING and not self._has_written:
            return FULL
        if self._is_replica and name in WRITING:
            return READ_ONLY
        self._has_written = self._has_written or name in WRITING
        return ""

    @property
    def _now_ms(self) -> int:
        return int(self._now_s * 1000)

    def _find(self, key: bytes) -> bytes | Hash | Set | SortedSet | None:
        end_ms = self._ends_ms.get(key)
        if end_ms is not None and self._now_ms > end_ms:
            self._drop(key)
        return self._values.get(key)

    def _get(self, key: bytes, kind: type[T]) -> T | None:
        value = self._find(key)
        if value is not None and type(value) is not kind:
            raise ReplyError(WRONG_TYPE)
        return value

    def _make(self, key: bytes, kind: type[T]) -> T:
        value = self._get(key, kind)
        if value is None:
            value = self._values[key] = kind()
        return value

    def _drop(self, key: bytes) -> None:
        self._ends_ms.pop(key, None)
        self._values.pop(key, None)

    # --- Servers ---------------------------------------------------------------------------------

    def do_ping(self, *text: bytes) -> Reply:
        if len(text) > 1:
            raise ReplyError(NO_ARGUMENTS.format("ping"))
        return text[0] if text else Status(b"PONG")

    def do_info(self, *sections: bytes) -> Reply:
        if len(sections) > 1:
            raise ReplyError("ERR syntax error")
        section = sections[0].lower() if sections else b"default"
        known = {
            b"server": (
                b"# Server\r\nredis_version:%s\r\nredis_mode:standalone\r\nrun_id:%s\r\n"
                % (VERSION, self._run_id)
            ),
            b"replication": b"# Replication\r\nrole:%s\r\nconnected_slaves:0\r\n"
            % (b"slave" if self._is_replica else b"master"),
        }
        if section in (b"default", b"all", b"everything"):
            return Text(b"\r\n".join(known.values()))
        return Text(known.get(section, b""))

    def do_time(self) -> Reply:
        micros = int(self._now_s * 1e6)
        return [b"%d" % (micros // 1_000_000), b"%d" % (micros % 1_000_000)]

    def do_cluster(self, *_: bytes) -> Reply:
        raise ReplyError("ERR This instance has cluster support disabled")

    def do_asking(self) -> Reply:
        return self.do_cluster()

    def do_flushall(self) -> Reply:
        self._values.clear()
        self._ends_ms.clear()
        return OK

    def do_config(self, action: bytes, name: bytes, value: bytes) -> Reply:
        if (action.lower(), name.lower()) != (b"set", b"maxmemory"):
            raise ReplyError("ERR not modelled")
        self._is_full = _integer(value) > 0  # the model takes more than any limit
        return OK

    def do_replicaof(self, host: bytes, port: bytes) -> Reply:
        self._is_replica = (host.lower(), port.lower()) != (b"no", b"one")
        return OK

    # --- Keys ------------------------------------------------------------------------------------

    def do_get(self, key: bytes) -> Reply:
        return self._get(key, bytes)

    def do_getrange(self, key: bytes, first: bytes, last: bytes) -> Reply:
        begin, end = _integer(first), _integer(last)
        value = self._get(key, bytes) or b""
        if begin < 0 and end < 0 and begin > end:
            return b""
        begin, end = (max(0, len(value) + at) if at < 0 else at for at in (begin, end))
        return value[begin : end + 1]

    def do_set(self, key: bytes, value: bytes, *expiry: bytes) -> Reply:
        end_ms = None
        if expiry:
            unit_ms = {b"ex": 1000, b"px": 1}.get(expiry[0].lower())
            if unit_ms is None or len(expiry) != 2:
                raise ReplyError("ERR syntax error")
            end_ms = self._now_ms + _integer(expiry[1]) * unit_ms
            if not self._now_ms < end_ms <= MAX_INTEGER:
                raise ReplyError("ERR invalid expire time in set")
        self._drop(key)
        self._values[key] = value
        if end_ms is not None:
            self._ends_ms[key] = end_ms
        return OK

    def do_del(self, key: bytes, *keys: bytes) -> Reply:
        found = [one for one in dict.fromkeys((key, *keys)) if self._find(one) is not None]
        for one in found:
            self._drop(one)
        return len(found)

    do_unlink = do_del

    def do_exists(self, key: bytes, *keys: bytes) -> Reply:
        return sum(self._find(one) is not None for one in (key, *keys))

    def do_pexpire(self, key: bytes, ms: bytes) -> Reply:
        end_ms = self._now_ms + _integer(ms)
        if end_ms > MAX_INTEGER:
            raise ReplyError("ERR invalid expire time in pexpire")
        if self._find(key) is None:
            return 0
        if end_ms <= self._now_ms:
            self._drop(key)
        else:
            self._ends_ms[key] = end_ms
        return 1

    def do_pttl(self, key: bytes) -> Reply:
        if self._find(key) is None:
            return -2
        return self._ends_ms[key] - self._now_ms if key in self._ends_ms else -1

    def do_persist(self, key: bytes) -> Reply:
        self._find(key)
        return int(self._ends_ms.pop(key, None) is not None)

    def do_scan(self, cursor: bytes, *options: bytes) -> Reply:
        begin = _cursor(cursor)
        end, keys = _page(list(self._values), begin, *_scan_options(options))
        return [end, [key for key in keys if self._find(key) is not None]]

    # --- Hashes ----------------------------------------------------------------------------------

    def do_hset(self, key: bytes, field: bytes, value: bytes, *pairs: bytes) -> Reply:
        if len(pairs) % 2:
            raise ReplyError(NO_ARGUMENTS.format("hset"))
        fields = self._make(key, Hash)
        before = len(fields)
        fields[field] = value
        fields.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(fields) - before

    def do_hget(self, key: bytes, field: bytes) -> Reply:
        return self._hash(key).get(field)

    def do_hmget(self, key: bytes, field: bytes, *fields: bytes) -> Reply:
        value = self._hash(key)
        return [value.get(one) for one in (field, *fields)]

    def do_hgetall(self, key: bytes) -> Reply:
        return Pairs(part for pair in self._hash(key).items() for part in pair)

    def do_hkeys(self, key: bytes) -> Reply:
        return list(self._hash(key))

    def do_hlen(self, key: bytes) -> Reply:
        return len(self._hash(key))

    def do_hdel(self, key: bytes, field: bytes, *fields: bytes) -> Reply:
        return self._remove(key, Hash, (field, *fields))

    def do_hincrby(self, key: bytes, field: bytes, by: bytes) -> Reply:
        change = _integer(by)
        before = self._hash(key).get(field, b"0")
        number = _sum(_integer(before, "ERR hash value is not an integer"), change)
        self._make(key, Hash)[field] = b"%d" % number
        return number

    def do_hscan(self, key: bytes, cursor: bytes, *options: bytes) -> Reply:
        begin = _cursor(cursor)
        fields = self._hash(key)
        if not fields:
            return [b"0", []]
        end, page = _page(list(fields), begin, *_scan_options(options))
        return [end, [part for field in page for part in (field, fields[field])]]

    def _hash(self, key: bytes) -> Hash:
        """Return the hash of a key, for reading: a missing one is empty."""
        return self._get(key, Hash) or Hash()

    def _remove(self, key: bytes, kind: type[Any], names: Iterable[bytes]) -> int:
        value = self._get(key, kind) or {}
        before = len(value)
        for name in names:
            value.pop(name, None)
        if before and not value:
            self._drop(key)
        return before - len(value)

    # --- Sets ------------------------------------------------------------------------------------

    def do_sadd(self, key: bytes, member: bytes, *members: bytes) -> Reply:
        value = self._make(key, Set)
        before = len(value)
        value.update(dict.fromkeys((member, *members), b""))
        return len(value) - before

    def do_smembers(self, key: bytes) -> Reply:
        return Members(self._get(key, Set) or ())

    def do_zadd(self, key: bytes, score: bytes, member: bytes, *pairs: bytes) -> Reply:
        if len(pairs) % 2:
            raise ReplyError("ERR syntax error")
        words = (score, member, *pairs)
        scores = [_float(word, "ERR value is not a valid float") for word in words[::2]]
        value = self._make(key, SortedSet)
        before = len(value)
        value.update(zip(words[1::2], scores, strict=True))
        return len(value) - before

    def do_zrem(self, key: bytes, member: bytes, *members: bytes) -> Reply:
        return self._remove(key, SortedSet, (member, *members))

    def do_zrangebyscore(self, key: bytes, least: bytes, most: bytes, *limit: bytes) -> Reply:
        begin, count = 0, -1
        if limit:
            if len(limit) != 3 or limit[0].lower() != b"limit":
                raise ReplyError("ERR syntax error")
            begin, count = _integer(limit[1]), _integer(limit[2])
        (low, skips_low), (high, skips_high) = _bound(least), _bound(most)
        found = [
            member
            for score, member in sorted(
                (score, member) for member, score in (self._get(key, SortedSet) or {}).items()
            )
            if (score > low if skips_low else score >= low)
            and (score < high if skips_high else score <= high)
        ]
        if begin < 0:
            return []
        return found[begin:] if count < 0 else found[begin : begin + count]

    # --- Scripts ---------------------------------------------------------------------------------

    def do_eval(self, text: bytes, count: bytes, *words: bytes) -> Reply:
        num_keys = _num_keys(count, words)
        digest = hashlib.sha1(text).hexdigest()
        if digest not in self._functions:
            compiled = self._compile(text)
            if isinstance(compiled, tuple):
                raise ReplyError(
                    f"ERR Error compiling script (new function): {compiled[1].decode('latin-1')}"
                )
            self._functions[digest] = compiled
        self._known.add(digest)
        return self._run_script(digest, words[:num_keys], words[num_keys:])

    def do_evalsha(self, digest: bytes, count: bytes, *words: bytes) -> Reply:
        name = digest.decode("latin-1").lower()
        if len(name) != 40:
            raise ReplyError(NO_SCRIPT)
        num_keys = _num_keys(count, words)
        if name not in self._known:
            raise ReplyError(NO_SCRIPT)
        return self._run_script(name, words[:num_keys], words[num_keys:])

    def do_script(self, action: bytes, *_: bytes) -> Reply:
        if action.lower() != b"flush":
            raise ReplyError("ERR Unknown subcommand or wrong number of arguments")
        self._known.clear()
        return OK

    def _run_script(self, digest: str, keys: Iterable[bytes], argv: Iterable[bytes]) -> Reply:
        table = self._lua.table_from
        try:
            value = self._run(self._functions[digest], table(list(keys)), table(list(argv)))
        except lua51.LuaError as exc:
            text = str(exc).partition("\nstack traceback:")[0].rstrip("\r\n")
            raise ReplyError(
                f"ERR Error running script (call to f_{digest}): @user_script: {text}"
            ) from exc
        return self._reply_of(value)

    def _call_from_lua(self, *words: Any) -> Any:
        """Run a command of a script, at the script's time; an error is a table."""
        try:
            if not words:
                raise ReplyError("Please specify at least one argument for redis.call()")
            if not all(isinstance(word, bytes) for word in words):
                raise ReplyError("Lua redis() command arguments must be strings or integers")
            name = words[0].decode("latin-1").lower()
            if name not in self._commands:
                raise ReplyError("Unknown Redis command called from Lua script")
            least, most, _ = self._commands[name]
            if not least <= len(words) - 1 <= most:
                raise ReplyError("Wrong number of args calling Redis command From Lua script")
            if name in NOT_IN_SCRIPTS:
                raise ReplyError("This Redis command is not allowed from scripts")
            if refusal := self._refusal(name):
                raise ReplyError(f"-{refusal}")
            return self._lua_of(self._execute(words))
        except ReplyError as exc:
            return self._lua.table_from({b"err": str(exc).encode("latin-1")})

    def _lua_of(self, reply: Reply) -> Any:
        if reply is None:
            return False
        if isinstance(reply, Status):
            return self._lua.table_from({b"ok": bytes(reply)})
        if isinstance(reply, list):
            return self._lua.table_from([self._lua_of(one) for one in reply])
        return reply

    def _decode_json(self, text: Any, null: Any) -> Any:
        """Return a table with the value as `ok`, or with an error as `err`."""

        def lua_of(value: Any) -> Any:
            if isinstance(value, str):
                return value.encode("utf-8", "surrogateescape")
            if isinstance(value, list):
                return self._lua.table_from([lua_of(one) for one in value])
            if isinstance(value, dict):
                return self._lua.table_from({lua_of(name): lua_of(value[name]) for name in value})
            return null if value is None else value

        try:
            value = json.loads(
                text.decode("utf-8", "surrogateescape"), strict=False, parse_int=float
            )
            return self._lua.table_from({b"ok": lua_of(value)})
        except (AttributeError, RecursionError, ValueError) as exc:
            return self._lua.table_from({b"err": f"Expected JSON, found {exc}".encode()})

    def _reply_of(self, value: Any) -> Reply:
        if isinstance(value, bool):
            return 1 if value else None
        if isinstance(value, bytes):
            return value
        if isinstance(value, int | float):
            # The result in C for a number outside the range of integers.
            is_integer = math.isfinite(value) and MIN_INTEGER <= value <= MAX_INTEGER
            return int(value) if is_integer else MIN_INTEGER
        if lua51.lua_type(value) != "table":
            return None
        if isinstance(error := value[b"err"], bytes):
            raise ReplyError(error.decode("latin-1"))
        if isinstance(status := value[b"ok"], bytes):
            return Status(status)
        found: list[Reply] = []
        while (one := value[len(found) + 1]) is not None:
            try:
                found.append(self._reply_of(one))
            except ReplyError as exc:
                found.append(exc)
        return found


def _commands_of(store: Store) -> Iterable[tuple[str, tuple[int, float, Callable[..., Reply]]]]:
    """Yield a store's commands, each with its minimum and maximum number of arguments."""
    for name in dir(store):
        if name.startswith("do_"):
            command = getattr(store, name)
            kinds = [one.kind for one in inspect.signature(command).parameters.values()]
            least = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
            most = math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else least
            yield name.removeprefix("do_"), (least, most, command)


def _json_of(value: Any) -> bytes:
    """Return what scripts store, as `cjson.encode` does: arrays of numbers and texts."""
    if isinstance(value, bytes):
        return b'"%s"' % re.sub(rb'[\0-\x1f"/\\\x7f]', _escaped, value)
    if isinstance(value, int | float):
        return b"%.14g" % value
    assert lua51.lua_type(value) == "table", "the model does not write this as JSON"
    parts: list[bytes] = []
    while (one := value[len(parts) + 1]) is not None:
        parts.append(_json_of(one))
    assert parts, "the model writes no empty tables as JSON"
    return b"[%s]" % b",".join(parts)


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"\\/" if found[0] == b"/" else json.dumps(found[0].decode())[1:-1].encode()


def _integer(word: bytes, error: str = NO_INTEGER) -> int:
    if not re.fullmatch(rb"0|-?[1-9][0-9]{0,18}", word):
        raise ReplyError(error)
    number = int(word)
    if not MIN_INTEGER <= number <= MAX_INTEGER:
        raise ReplyError(error)
    return number


def _sum(number: int, change: int) -> int:
    if not MIN_INTEGER <= number + change <= MAX_INTEGER:
        raise ReplyError("ERR increment or decrement would overflow")
    return number + change


def _float(word: bytes, error: str) -> float:
    if not re.fullmatch(rb"[+-]?(inf(inity)?|(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)", word, re.I):
        raise ReplyError(error)
    return float(word)


def _bound(word: bytes) -> tuple[float, bool]:
    """Return a bound of a range of scores, and whether the range excludes it."""
    return _float(word.removeprefix(b"("), "ERR min or max is not a float"), word[:1] == b"("


def _num_keys(count: bytes, words: Iterable[bytes]) -> int:
    num_keys = _integer(count)
    if num_keys > len(list(words)):
        raise ReplyError("ERR Number of keys can't be greater than number of args")
    if num_keys < 0:
        raise ReplyError("ERR Number of keys can't be negative")
    return num_keys


def _cursor(word: bytes) -> int:
    if not re.fullmatch(rb"[0-9]{1,19}", word):
        raise ReplyError("ERR invalid cursor")
    return int(word)


def _scan_options(options: Iterable[bytes]) -> tuple[int, re.Pattern[bytes] | None]:
    """Return the size of a page, and the pattern of requested names."""
    words = list(options)
    count, pattern = DEFAULT_SCAN_COUNT, None
    while words:
        name, *words = words
        if name.lower() not in (b"count", b"match") or not words:
            raise ReplyError("ERR syntax error")
        value, *words = words
        if name.lower() == b"match":
            pattern = _pattern(value)
            continue
        count = _integer(value)
        if count < 1:
            raise ReplyError("ERR syntax error")
    return count, pattern


def _pattern(glob: bytes) -> re.Pattern[bytes]:
    if re.search(rb"[\[\\]", glob):
        raise ReplyError("ERR the model knows only * and ? in patterns")
    return re.compile(re.escape(glob).replace(rb"\*", b".*").replace(rb"\?", b"."), re.DOTALL)


def _page(
    names: list[bytes], begin: int, count: int, pattern: re.Pattern[bytes] | None
) -> tuple[bytes, list[bytes]]:
    """Return the next cursor and a page of names.

    A cursor is a hash: additions and removals between pages make a scan skip no other name.
    """
    end = 0
    if begin or len(names) > count:
        ordered = sorted((zlib.crc32(name) + 1, name) for name in names)
        ordered = [pair for pair in ordered if pair[0] >= begin]
        # Names with the same hash share a page.
        if len(ordered) > count:
            last = ordered[count - 1][0]
            end = next((at for at, _ in ordered[count:] if at > last), 0)
        names = [name for at, name in ordered if not end or at < end]
    if pattern is not None:
        names = [name for name in names if pattern.fullmatch(name)]
    return b"%d" % end, names


_PRELUDE = rb"""
local call_store, decode_json, encode_json = ...
local error, loadstring, rawset, globals = error, loadstring, rawset, _G
local select, tonumber, tostring, type, unpack = select, tonumber, tostring, type, unpack
local byte, char, concat, floor = string.byte, string.char, table.concat, math.floor
local format, gsub = string.format, string.gsub

redis, cjson, struct = {}, {}, {}

local function execute(...)
  local words, count = {...}, select('#', ...)
  for i = 1, count do
    if type(words[i]) == 'number' then words[i] = format('%.17g', words[i]) end
  end
  return call_store(unpack(words, 1, count))
end

function redis.pcall(...) return execute(...) end

function redis.call(...)
  local reply = execute(...)
  if type(reply) == 'table' and reply.err then error(reply.err, 0) end
  return reply
end

function redis.error_reply(text) return {err = text} end

function redis.status_reply(text) return {ok = text} end

-- Refuse an argument. Where in the script is left out, as is where in this text.
local function refuse(text) error(text, 0) end

cjson.null = newproxy()

function cjson.decode(text)
  local found = decode_json(text, cjson.null)
  if found.err then refuse(found.err) end
  return found.ok
end

function cjson.encode(value) return encode_json(value) end

-- Formats of unsigned integers of four bytes, the lowest first.
local function count_of(form)
  local rest, count = gsub(form, 'I4', '')
  if rest ~= '<' then refuse("invalid format option '" .. rest .. "'") end
  return count
end

function struct.pack(form, ...)
  local bytes = {}
  for i = 1, count_of(form) do
    local value = tonumber((select(i, ...)))
    if not value then refuse('bad argument #' .. i + 1 .. " to 'pack' (number expected)") end
    value = value < 0 and -floor(-value) or floor(value)
    for place = 0, 3 do bytes[#bytes + 1] = char(floor(value / 256 ^ place) % 256) end
  end
  return concat(bytes)
end

function struct.unpack(form, data)
  local found, at = {}, 1
  for i = 1, count_of(form) do
    local one, two, three, four = byte(data, at, at + 3)
    if not four then refuse("bad argument #2 to 'unpack' (data string too short)") end
    found[i], at = one + 256 * (two + 256 * (three + 256 * four)), at + 4
  end
  found[#found + 1] = at
  return unpack(found)
end

for _, name in pairs({'dofile', 'io', 'loadfile', 'module', 'newproxy', 'os', 'package', 'python', 'require'}) do
  globals[name] = nil
end
setmetatable(globals, {
  __index = function(_, name)
    error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
  end,
  __newindex = function() error('Attempt to modify a readonly table', 2) end,
})

local function run(script, keys, argv)
  rawset(globals, 'KEYS', keys)
  rawset(globals, 'ARGV', argv)
  return (script())
end

return function(text) return loadstring(text, '@user_script') end, run
"""  # noqa: E501


def encode(reply: Reply, protocol: int = 2) -> bytes:
    """Return a reply in RESP2 or RESP3."""
    if reply is None:
        return b"$-1\r\n" if protocol == 2 else b"_\r\n"
    if isinstance(reply, ReplyError):
        return b"-%s\r\n" % _line(str(reply).encode("latin-1"))
    if isinstance(reply, Status):
        return b"+%s\r\n" % _line(reply)
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, Text) and protocol == 3:
        return b"=%d\r\ntxt:%s\r\n" % (len(reply) + 4, reply)
    if isinstance(reply, bytes):
        return b"$%d\r\n%s\r\n" % (len(reply), reply)
    if isinstance(reply, Pairs) and protocol == 3:
        head = b"%%%d\r\n" % (len(reply) // 2)
    else:
        mark = b"~" if isinstance(reply, Members) and protocol == 3 else b"*"
        head = b"%s%d\r\n" % (mark, len(reply))
    return head + b"".join(encode(one, protocol) for one in reply)


def _line(text: bytes) -> bytes:
    return text.replace(b"\r", b" ").replace(b"\n", b" ")


class Session:
    """One client's connection: takes the client's bytes, returns the replies.

    Args:
        store: What the commands are for.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._number = store.number_client()
        self._protocol = 2
        self._received = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Run the commands that are now complete, and return their replies."""
        self._received += data
        replies, at = [], 0
        while (found := self._command_at(at)) is not None:
            words, at = found
            try:
                reply = self._answer(words)
            except ReplyError as exc:
                reply = exc
            replies.append(encode(reply, self._protocol))
        del self._received[:at]
        return b"".join(replies)

    def _command_at(self, begin: int) -> tuple[Words, int] | None:
        """Return a command and the start of the next one, or None until it is complete."""
        data = self._received
        line_end = data.find(b"\r\n", begin)
        if line_end < 0:
            return None
        assert data[begin] == ord("*"), "clients send arrays"
        words, at = [], line_end + 2
        for _ in range(int(data[begin + 1 : line_end])):
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                return None
            word, size = line_end + 2, int(data[at + 1 : line_end])
            at = word + size + 2
            if at > len(data):
                return None
            words.append(bytes(data[word : word + size]))
        return words, at

    def _answer(self, words: Words) -> Reply:
        name, *rest = words
        if name.lower() == b"hello":
            return self._hello(*rest)
        if name.lower() == b"client":
            if not rest:
                raise ReplyError(NO_ARGUMENTS.format("client"))
            raise ReplyError(
                "ERR Unknown subcommand or wrong number of arguments for "
                f"'{rest[0].decode('latin-1')}'. Try CLIENT HELP."
            )
        return self._store.execute(words)

    def _hello(self, version: bytes = b"", *options: bytes) -> Reply:
        if version:
            wanted = _integer(version, "ERR Protocol version is not an integer or out of range")
            if wanted not in (2, 3):
                raise ReplyError("NOPROTO unsupported protocol version")
            if options:
                raise ReplyError(
                    f"ERR Syntax error in HELLO option '{options[0].decode('latin-1')}'"
                )
            self._protocol = wanted
        about = {
            b"server": b"redis",
            b"version": VERSION,
            b"proto": self._protocol,
            b"id": self._number,
            b"mode": b"standalone",
            b"role": b"master",
            b"modules": [],
        }
        return Pairs(part for pair in about.items() for part in pair)


class Connection(asyncio.Protocol):
    """Serves one client of a store.

    Args:
        store: What the commands are for.
    """

    def __init__(self, store: Store) -> None:
        self._session = Session(store)
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        replies = self._session.feed(data)
        if replies:
            self._transport.write(replies)


class RedisServer:
    """Redis' data outlives its process: a restart finds it, as with a synced append-only file.

    `flush` deletes it, as a restart without a file does.
    """

    def __init__(self) -> None:
        self.store = Store(threads.wall_time, threads.kernel.random)

    def flush(self) -> None:
        """Forget everything but the scripts."""
        self.store.do_flushall()

    def main(self) -> int:
        """Serve port 6379 until the process ends."""
        self.store.restart()
        asyncio.run(self._serve())
        return 0

    async def _serve(self) -> None:
        listening = await asyncio.get_running_loop().create_server(
            lambda: Connection(self.store), "0.0.0.0", PORT
        )
        await listening.serve_forever()
