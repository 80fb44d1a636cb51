"""Check that the Redis of lookup and broker runs, and that its settings keep the index safe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from lmcache_ctl.doctor.configuration import Loaded
from lmcache_ctl.doctor.findings import Finding, Subject

CHECK: Final = "redis"
MIN_VERSION: Final = (6, 2)
FULL_SHARE: Final = 0.9
MAX_SERVERS: Final = 64


def check_redis(loaded: Sequence[Loaded], timeout_s: float) -> list[Finding]:
    """Check every Redis that a settings file names as `redis_url`."""
    seen: dict[str, tuple[str, Any]] = {}
    for file, settings in loaded:
        secret = getattr(settings, "redis_url", None)
        if secret is not None:
            seen.setdefault(secret.get_secret_value(), (f"{file.kind} {file.path}", settings))
    return [
        one
        for url, (where, settings) in seen.items()
        for one in _of_url(url, where, settings, timeout_s)
    ]


def _of_url(url: str, where: str, settings: Any, timeout_s: float) -> Iterator[Finding]:
    subject = Subject(CHECK, where)
    try:
        import redis
    except ModuleNotFoundError:
        fix = "install lmcache-ctl[redis], or check it in the service's image"
        yield subject.warning("not checked: the package redis is not installed here", fix)
        return
    try:
        clients = _clients(url, settings, timeout_s)
    except (ValueError, redis.RedisError) as exc:
        what = f"redis_url leads nowhere: {type(exc).__name__}"
        yield subject.error(what, "see docs/operations.md, Redis")
        return
    for name, client in clients:
        with client:
            try:
                info: Mapping[str, Any] = client.info()
            except (redis.RedisError, OSError, ValueError) as exc:
                why = str(exc).splitlines()[0][:200] if str(exc) else type(exc).__name__
                fix = "start it, or correct redis_url; an ACL must allow INFO and PING"
                yield Subject(CHECK, f"{where}, {name}").error(f"no answer: {why}", fix)
                continue
        yield from check_info(f"{where}, {name}", info)


def check_info(where: str, info: Mapping[str, Any]) -> Iterator[Finding]:
    """Check what a server's `INFO` says.

    Args:
        where: Which server.
        info: As redis-py returns it.
    """
    subject = Subject(CHECK, where)
    told = f"version {info.get('redis_version')}"
    parts = str(info.get("redis_version", "0")).split(".")[:2]
    if tuple(int(part) for part in parts if part.isdigit()) < MIN_VERSION:
        yield subject.error(told, "upgrade it to 6.2 or later")
    if info.get("role") not in (None, "master"):
        fix = "name the master, or its sentinels (redis-sentinel://)"
        yield subject.error(f"it is a {info['role']}: nothing can be written", fix)
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if limit and policy != "noeviction":
        fix = (
            "CONFIG SET maxmemory-policy noeviction: a bucket that is evicted takes the holders of"
            " many chunks with it"
        )
        yield subject.error(f"maxmemory-policy is {policy}", fix)
    if not limit:
        what = "maxmemory is not set: it grows until it is killed"
        yield subject.warning(what, "CONFIG SET maxmemory; 120 bytes a chunk")
    elif used > FULL_SHARE * limit:
        fix = "raise maxmemory: a full one takes no events"
        yield subject.warning(f"{used / limit:.0%} of maxmemory are used", fix)
    if int(info.get("aof_enabled", 0)):
        what = "it writes every change to a disk (appendonly), which nothing needs"
        yield subject.note(what, "appendonly no: what is lost is announced again by itself")
    changes = int(info.get("rdb_changes_since_last_save", 0))
    if str(info.get("rdb_last_bgsave_status", "ok")) != "ok" and changes:
        fix = (
            'save "", or give it room on its disk; where stop-writes-on-bgsave-error is set, it'
            " takes no events"
        )
        yield subject.error("its last snapshot failed", fix)
    yield subject.ok(told)


def _clients(url: str, settings: Any, timeout_s: float) -> list[tuple[str, Any]]:
    """Return a client for each server, by a name without credentials."""
    import redis
    from redis.sentinel import Sentinel

    parts = urlsplit(url)
    limits: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    tls: dict[str, Any] = {}
    if parts.scheme.startswith("rediss"):
        files = {
            "ssl_ca_certs": "redis_tls_ca_file",
            "ssl_certfile": "redis_tls_cert_file",
            "ssl_keyfile": "redis_tls_key_file",
        }
        named = {argument: getattr(settings, option, None) for argument, option in files.items()}
        tls = {argument: str(path) for argument, path in named.items() if path is not None}
    if parts.scheme in ("redis", "rediss", "unix"):
        name = parts.netloc.rpartition("@")[2] or parts.path
        return [(name, redis.Redis.from_url(url, **limits, **tls))]
    encrypted = {"ssl": True, **tls} if parts.scheme.startswith("rediss") else {}
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    credentials: dict[str, Any] = {
        "username": unquote(user) or None,
        "password": unquote(password) or None,
    }
    default_port = 26379 if "sentinel" in parts.scheme else 6379
    names = parts.netloc.rpartition("@")[2].split(",")[:MAX_SERVERS]
    hosts = [_address(text, default_port) for text in names]
    if "sentinel" in parts.scheme:
        sentinels: Any = Sentinel(hosts, **limits, **encrypted)  # type: ignore[no-untyped-call]
        host, port = sentinels.discover_master(parts.path.strip("/") or "mymaster")
        hosts = [(str(host), int(port))]
    return [
        (f"{host}:{port}", redis.Redis(host=host, port=port, **credentials, **limits, **encrypted))
        for host, port in hosts
    ]


def _address(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("an address without a host")
    return parts.hostname, parts.port or default_port
