"""Check that the Redis of lookup and broker runs, and that its settings keep the index safe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from lmcache_core.errors import LMCacheError
from lmcache_core.extras import install_line

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
        line = install_line("redis", "libs/lmcache_core", "libs/lmcache_ctl")
        fix = f"{line}, or check it in the service's image"
        yield subject.warning("not checked: the package redis is not installed here", fix)
        return
    try:
        clients = _clients(url, settings, timeout_s)
    except (ValueError, LMCacheError, redis.RedisError) as exc:
        what = f"redis_url leads nowhere: {type(exc).__name__}"
        yield subject.error(what, "see docs/operations.md, Redis")
        return
    for name, client in clients:
        with client:
            try:
                info: Mapping[str, Any] = client.info()
            except (redis.RedisError, OSError, ValueError) as exc:
                why = str(exc).splitlines()[0][:200] if str(exc) else type(exc).__name__
                what, fix = f"no answer: {why}", "start it, or correct redis_url"
                if isinstance(exc, redis.AuthenticationError):
                    what, fix = f"it refuses the password: {why}", "correct that in redis_url"
                elif isinstance(exc, redis.exceptions.NoPermissionError):
                    what, fix = f"it refuses INFO: {why}", "let the ACL allow INFO and PING"
                yield Subject(CHECK, f"{where}, {name}").error(what, fix)
                continue
        yield from check_info(f"{where}, {name}", info)


def check_info(where: str, info: Mapping[str, Any]) -> Iterator[Finding]:
    """Check what a server's `INFO` says.

    Args:
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
    from lmcache_servicekit.redis_settings import RedisUrl
    from lmcache_servicekit.settings import read_secret_file
    from redis.sentinel import Sentinel

    parsed = RedisUrl.parse(url)
    limits: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    tls: dict[str, Any] = {}
    if parsed.has_tls:
        files = settings.redis_tls
        named = {
            "ssl_certfile": files.cert_file,
            "ssl_keyfile": files.key_file,
            "ssl_ca_certs": files.ca_file,
        }
        tls = {argument: str(path) for argument, path in named.items() if path is not None}
    if not parsed.addresses:
        return [(parsed.where, redis.Redis.from_url(url, **limits, **tls))]
    encrypted = {"ssl": True, **tls} if parsed.has_tls else {}
    user, password = parsed.credentials
    servers = list(parsed.addresses[:MAX_SERVERS])
    if parsed.has_sentinels:
        option = "redis_sentinel_password_file"
        login = {
            "username": settings.redis_sentinel_username,
            "password": read_secret_file(settings.redis_sentinel_password_file, option),
        }
        sentinels: Any = Sentinel(  # type: ignore[no-untyped-call]
            servers, sentinel_kwargs={**limits, **encrypted, **login}
        )
        servers = [sentinels.discover_master(parsed.service)]
    credentials: dict[str, Any] = {"username": user, "password": password}
    return [
        (f"{host}:{port}", redis.Redis(host=host, port=port, **credentials, **limits, **encrypted))
        for host, port in servers
    ]
