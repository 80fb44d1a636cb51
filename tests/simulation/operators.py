"""What an operator of the cluster asks of the services, and what must be true of the answers."""

from __future__ import annotations

import contextlib
import io
import json
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.simulation.cluster import (
    REST_PORT,
    SERVICES,
    SIDECARS,
    STORAGES,
    Cluster,
)
from tests.simulation.faults import Faults
from tests.simulation.world import World

ADMIN_BOUND_S = 15.0
RECORD_TYPE = "application/vnd.lmcache.record"
ENDING_PINS = ("/clear", "/drain", "/unpin")
MAX_NAMED = 8
"""Chunks that one call names."""
COMMANDS = (
    "status -o json",
    "status",
    "doctor -o json",
    "lookup status -o json",
    "lookup tenants -o json",
    "lookup prefix {id}",
    "lookup locations {id} -o json",
    "lookup route {id}",
    "pin --at storage/{storage} -o json",
    "pin --at sidecar --ttl 20 {hash}",
    "evict sidecar/{node} --size 1MiB",
    "evict storage/{storage} --everything --yes",
    "drain {instance} --within 3",
    "drain peer/{node} --no-wait",
)
"""Commands of `lmcachectl`."""
COMMAND_BOUND_S = 30.0
"""A command asks a service for 5 s at most, a few times."""
MAX_UNDRAINS = 60
Calls = Mapping[str, Sequence[tuple[str, str]]]
CALLS: Calls = {
    "node": (
        ("GET", "/v1/status"),
        ("GET", "/v1/tiers"),
        ("GET", "/v1/clients"),
        ("GET", "/v1/admin/chunks"),
        ("GET", "/v1/admin/pins"),
        ("GET", "/metrics"),
        ("POST", "/v1/admin/pin"),
        ("POST", "/v1/admin/unpin"),
        ("POST", "/v1/admin/clear"),
        ("POST", "/v1/admin/evict"),
    ),
    "storage": (
        ("GET", "/v1/stats"),
        ("GET", "/v1/chunks"),
        ("GET", "/metrics"),
        ("POST", "/v1/admin/pin"),
        ("POST", "/v1/admin/clear"),
        ("POST", "/v1/admin/evict"),
    ),
    "lookup": (("GET", "/v1/stats"), ("GET", "/v1/admin/tenants"), ("POST", "/v1/admin/clear")),
    "broker": (("GET", "/v1/peers"), ("GET", "/v1/overview"), ("GET", "/metrics")),
}
LOG_LEVEL = "/v1/admin/log-level"
MORE_CALLS: Calls = {
    "node": (
        ("POST", "/v1/admin/explain"),
        ("GET", "/v1/admin/lookups?request_id=engine"),
        ("GET", LOG_LEVEL),
        ("PUT", LOG_LEVEL),
    ),
    "storage": (
        ("GET", "/v1/admin/pins"),
        ("POST", "/v1/admin/unpin"),
        ("GET", "/v1/chunks/{key}"),
        ("HEAD", "/v1/chunks/{key}"),
        ("PUT", "/v1/chunks/{key}"),
        ("DELETE", "/v1/chunks/{key}"),
        ("POST", "/v1/chunks:contains"),
        ("POST", "/v1/chunks:get"),
        ("PUT", LOG_LEVEL),
    ),
    "lookup": (
        ("GET", "/v1/instances"),
        ("DELETE", "/v1/instances/{instance}"),
        ("POST", "/v1/admin/evict"),
        ("PUT", LOG_LEVEL),
    ),
    "broker": (
        ("GET", "/v1/stats"),
        ("GET", "/v1/peers/{instance}"),
        ("DELETE", "/v1/peers/{instance}"),
        ("PUT", LOG_LEVEL),
    ),
}
"""Calls with dice of their own."""


class Operator:
    """An operator of the cluster.

    Args:
        world: The simulated world.
        cluster: The cluster to ask.
        seed: Decides the calls.
        faults: The faults of the run, some of which are calls, too.
        count: Called with the name of each call.
        complain: Records a violation.

    Attributes:
        unpinned_s: When something last ended pins of a node or a storage, or may have.
        shown: What the last command said.
        has_forgotten: Whether it made lookup forget holders, which need not announce their chunks
            again by themselves.
    """

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        seed: int,
        faults: Faults,
        count: Callable[[str], None],
        complain: Callable[[str], None],
    ) -> None:
        self._kernel = world.kernel
        self._pace = world.pace
        self._cluster = cluster
        self._more_dice = random.Random(f"more of calls {seed}")
        self._seed = seed
        self._faults = faults
        self._count = count
        self._complain = complain
        self._num_removals = 0
        self.unpinned_s: dict[str, float] = {}
        self.has_forgotten = False
        self.shown = ""

    def work(self, name: str, calls: Calls, is_working: Callable[[], bool]) -> None:
        """Make calls now and then.

        Args:
            name: Decides them, with the seed.
            calls: The calls to choose from, by kind of service.
            is_working: Returns False when it is time to end.
        """
        dice = random.Random(f"{name} {self._seed}")
        pause_s = dice.choice(self._pace.operator_s)
        # Each run has its own habits, so that some calls are frequent in it.
        habits = {
            kind: dice.sample(some, dice.randint(2, len(some))) for kind, some in calls.items()
        }
        while True:
            self._kernel.sleep(dice.expovariate(1 / pause_s))
            if not is_working():
                return
            service = dice.choice(SERVICES)
            method, path = dice.choice(habits[service.split("-")[0]])
            tenant = self._cluster.tenant_of(service)
            if service not in SIDECARS:
                tenant = self._more_dice.choice(self._cluster.tenants)
            self._do(service, method, path, dice, tenant)

    # --- Commands --------------------------------------------------------------------------------

    def command(self, is_working: Callable[[], bool]) -> None:
        """Run `lmcachectl` now and then; what it drained it undrains."""
        dice = random.Random(f"commands {self._seed}")
        pause_s = dice.choice(self._pace.operator_s)
        habits = dice.sample(COMMANDS, dice.randint(3, len(COMMANDS)))
        while True:
            self._kernel.sleep(dice.expovariate(1 / pause_s))
            if not is_working():
                return
            node, storage = dice.choice(SIDECARS), dice.choice(STORAGES)
            words = dice.choice(habits).format(
                id=f"{dice.getrandbits(128):032x}",
                hash=f"{dice.getrandbits(256):064x}",
                node=node,
                storage=storage,
                instance=dice.choice((f"sidecar/{node}", f"storage/{storage}")),
            )
            if words.startswith("drain"):
                self._drain_and_undrain(words, self._cluster.tenant_of(node))
            else:
                self.run(words, self._cluster.tenant_of(node))

    def _drain_and_undrain(self, words: str, tenant: str) -> None:
        target = words.split()[1].replace("peer/", "sidecar/")
        name = target.split("/")[1]
        self._faults.num_orders[name] += 1
        self._faults.open_orders[name] += 1
        self.run(words, tenant)
        for _ in range(MAX_UNDRAINS):
            self._kernel.sleep(self._pace.lease_s / 3)  # until a broker's order has come
            if self.run(f"undrain {target}", tenant) == 0:
                break
        self._faults.open_orders[name] -= 1

    def run(self, words: str, tenant: str) -> int | None:
        """Run a command; return its exit code, and None if it raised something."""
        from lmcache_ctl.cli import main

        operation = f"lmcachectl {words.split(' ')[0]}"
        self._count(operation)
        where = {
            "lookup": ("lookup-0",), "broker": ("broker-0", "broker-1"),
            "storage": STORAGES, "sidecar": SIDECARS,
        }  # fmt: skip
        options = ["--token-file", str(self._cluster.admin_file(tenant))]
        for kind, names in where.items():
            for name in names:
                options += [f"--{kind}-url", f"http://{name}:{REST_PORT}"]
        if not words.startswith(("status", "doctor", "lookup")):
            self.unpinned_s |= dict.fromkeys((*SIDECARS, *STORAGES), self._kernel.now)
        begin, was_quiet, code = self._kernel.now, self._is_quiet, None
        shown, said = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said):
                main([*words.split(), *options])
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else 0
        except Exception:
            self._complain(f"lmcachectl {words} raised:\n{traceback.format_exc()}")
        lasted_s = self._kernel.now - begin
        self._kernel.record(f"operator lmcachectl {words} {code}")
        if code == 2:
            self._complain(f"lmcachectl {words} was refused: {said.getvalue()}")
        if "-o json" in words and shown.getvalue():
            try:
                json.loads(shown.getvalue())
            except ValueError:
                self._complain(f"lmcachectl {words} shows no JSON: {shown.getvalue()[:200]}")
        if lasted_s > COMMAND_BOUND_S and was_quiet and self._is_quiet:
            self._complain(f"lmcachectl {words} lasted {lasted_s:.1f} s")
        self.shown = shown.getvalue() + said.getvalue()
        return code

    def _do(self, name: str, method: str, path: str, dice: random.Random, tenant: str) -> None:
        operation = f"{method} {name.split('-')[0]}{path.partition('?')[0]}"
        self._count(operation)
        if "{key}" in path:
            self._do_chunk(name, method, path, dice, tenant)
            return
        body, where = self._body(name, path, dice, tenant), path
        if "{instance}" in path:
            instance = dice.choice((*SIDECARS, *STORAGES))
            where, tenant = path.format(instance=instance), self._cluster.tenant_of(instance)
        status, answer = self._judged(name, method, where, operation, tenant, body)
        if status == 404 and "{" not in path:
            self._complain(f"{operation} on {name} was answered by 404")
        if method == "POST" and path.endswith(("/clear", "/evict")):
            self._num_removals += 1
            self.has_forgotten |= name.startswith("lookup") and path.endswith("/evict")
        elif status == 200 and path.endswith(":contains"):
            if len(answer["present"]) != len(body["keys"]):
                self._complain(f"{operation} on {name} answers {answer} to {body}")
        elif status == 200 and path.endswith(":get"):
            self._check_records(name, answer, body["keys"])

    def _judged(
        self, name: str, method: str, path: str, operation: str, tenant: str, body: object = None
    ) -> tuple[int | None, Any]:
        begin = self._kernel.now
        status, answer = self.call(name, method, path, body, tenant)
        lasted_s = self._kernel.now - begin
        self._kernel.record(f"operator {operation} {name} {status}")
        if status in {405, 422, 500}:
            self._complain(f"{operation} on {name} was answered by {status}")
        if lasted_s > ADMIN_BOUND_S and not self._faults.active:
            self._complain(f"{operation} on {name} lasted {lasted_s:.1f} s")
        return status, answer

    def _body(self, name: str, path: str, dice: random.Random, tenant: str) -> Any:
        from lmcache_core.keys import CacheEngineKey

        if path == LOG_LEVEL:
            # One process runs all services here: what they log must reach the run's own log.
            return {"level": dice.choice(("debug", "info")), "logger": "lmcache_core"}
        if path.endswith("/clear") and name in (*SIDECARS, *STORAGES):
            parts: tuple[object, ...] = ({"tiers": ["memory"]}, {"tiers": ["disk"]})
            if name in STORAGES:
                parts = ({"all_tenants": True}, {"tenant": tenant})
            return self._more_dice.choice((None, *parts))
        if path.endswith("/evict"):
            if not name.startswith("lookup"):
                return {"num_bytes": 1 << dice.randint(10, 24)}
            of = dice.choice((*SIDECARS, *STORAGES))
            keys = self._listed(of, dice, tenant if of in STORAGES else None)
            ids = [CacheEngineKey.from_url(key).chunk_id().hex() for key in keys]
            return {"chunk_ids": ids or ["0" * 32], "tenant": dice.choice((None, tenant))}
        if path.startswith("/v1/chunks:"):
            return {"keys": self._listed(name, dice, tenant)}
        if path.endswith("/explain"):
            keys = self._listed(dice.choice((name, *SIDECARS)), dice)
            hashes = [CacheEngineKey.from_url(key).chunk_hash for key in keys]
            return {"chunk_hashes": hashes or ["0" * 64]}
        if name in STORAGES and path.endswith("/unpin"):
            return dice.choice(
                (None, {"keys": self._listed(name, dice, tenant) or [_absent_key()]})
            )
        if not path.endswith("/pin"):
            return None
        keys = self._listed(name, dice, tenant)
        ttl_s = {"ttl_s": dice.choice((5, 60))}
        if name in STORAGES:
            return {"keys": keys or [_absent_key()]} | ttl_s
        hashes = [CacheEngineKey.from_url(key).chunk_hash for key in keys]
        return {"chunk_hashes": hashes or ["0" * 64]} | ttl_s

    def _listed(self, name: str, dice: random.Random, tenant: str | None = None) -> list[str]:
        """Return keys of a few chunks that a node or a storage lists."""
        where = "/v1/chunks" if name in STORAGES else "/v1/admin/chunks"
        _, listed = self.call(name, "GET", where, None, tenant)
        chunks = listed.get("chunks", []) if isinstance(listed, dict) else []
        chunks = dice.sample(chunks, min(len(chunks), MAX_NAMED))
        return [chunk["key"] for chunk in chunks] if name in STORAGES else chunks

    def call(
        self,
        name: str,
        method: str,
        path: str,
        body: object = None,
        tenant: str | None = None,
        token: int | None = None,
    ) -> tuple[int | None, Any]:
        """Return the status and the body of an answer to this tenant's operator, by default that
        of the service; None if there was none.

        Args:
            name: The service.
            method: Of the request.
            path: Of the request.
            body: Of the request: bytes, or what JSON can hold.
            tenant: The operator's.
            token: Number of the token to show; None: the current one.
        """
        import httpx

        cluster = self._cluster
        number = cluster.shown if token is None else token
        shown = cluster.token(number, tenant or cluster.tenant_of(name))
        headers = {"Authorization": f"Bearer {shown}"}
        url = f"http://{name}:{REST_PORT}{path}"
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        ends_pins = method == "DELETE" or any(word in path for word in ENDING_PINS)
        if ends_pins:
            self.unpinned_s[name] = self._kernel.now
        try:
            with httpx.Client(timeout=ADMIN_BOUND_S, verify=False, trust_env=False) as client:
                answer = client.request(method, url, headers=headers, **content)
        except httpx.HTTPError:
            return None, None
        finally:
            if ends_pins:
                self.unpinned_s[name] = self._kernel.now
        media_type = answer.headers.get("content-type", "")
        if media_type == RECORD_TYPE:
            return answer.status_code, answer.content
        is_json = bool(answer.content) and "json" in media_type
        return answer.status_code, answer.json() if is_json else answer.text

    # --- Chunks of a storage ---------------------------------------------------------------------

    def _do_chunk(
        self, name: str, method: str, path: str, dice: random.Random, tenant: str
    ) -> None:
        """Do something with one chunk of a storage, and look at once whether it is so."""
        operation = f"{method} storage{path}"
        keys = self._listed(dice.choice((name, *STORAGES)), dice, tenant)
        key = keys[0] if keys else _absent_key()
        where, body, source = path.format(key=key), None, name
        if method == "PUT":
            source = dice.choice(STORAGES)
            status, body = self._judged(source, "GET", where, operation, tenant)
            if status != 200:
                return
            if dice.random() < 0.5:
                self._num_removals += 1
                self._judged(name, "DELETE", where, operation, tenant)
        was_quiet, num_removals = self._is_quiet, self._num_removals
        status, answer = self._judged(name, method, where, operation, tenant, body)
        if method == "GET" and status == 200:
            self._check_records(name, answer, [key])
        if method not in {"PUT", "DELETE"} or status not in {201, 204}:
            return
        if method == "DELETE":
            self._num_removals += 1
            num_removals += 1
        again, answer = self._judged(name, "GET", where, operation, tenant)
        if method == "PUT" and again == 200:
            self._check_records(name, answer, [key])
        if not (was_quiet and self._is_quiet and num_removals == self._num_removals):
            return
        if again is not None and (again == 200) != (method == "PUT"):
            self._complain(
                f"{operation} on {name} was answered by {status}, and then GET by {again} {answer}"
            )

    @property
    def _is_quiet(self) -> bool:
        return not any(self._faults.active.values())

    def _check_records(self, name: str, content: bytes, keys: Sequence[str]) -> None:
        """Check that an answer consists of intact records of these keys, in their order."""
        from lmcache_core.errors import RecordError

        try:
            found = list(_keys_of_records(content))
        except RecordError as exc:
            self._complain(f"{name} serves a record over REST: {exc}")
            return
        if [key for key in dict.fromkeys(keys) if key in found] != found:
            self._complain(f"{name} serves {found} over REST instead of {keys}")


def _keys_of_records(content: bytes) -> Iterator[str]:
    """Verify records that follow one another; yield their keys in the URL form.

    Raises:
        RecordError: One is damaged.
    """
    from lmcache_core.record import PREFIX_BYTES, decode_head, decode_prefix, verify_payload

    rest = memoryview(content)
    while rest:
        prefix = decode_prefix(rest[:PREFIX_BYTES])
        end = prefix.head_bytes + prefix.payload_bytes
        header, _ = decode_head(rest[: prefix.head_bytes])
        verify_payload(header, rest[prefix.head_bytes : end])
        yield header.engine_key().to_url()
        rest = rest[end:]


def _absent_key() -> str:
    from lmcache_core.keys import CacheEngineKey

    return CacheEngineKey("vllm", "none", 1, 0, "0" * 64).to_url()
