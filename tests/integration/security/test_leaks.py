"""No secret is in logs, metrics, answers or printed settings; actions of admins are audited."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import httpx
from lmcache_core.errors import LMCacheError

from tests.fixtures.guarded_services import REST_NAMES, SALT, TICKET_SECRET, TOKENS, Guarded
from tests.fixtures.waiting import wait_until
from tests.integration.security.test_ports import CALLS, CHUNK, allocate, ticket
from tests.suites.chunks import make_key

WRONG = "wrong-token-0123456789-mistyped"


def secrets_of(guarded: Guarded) -> Iterator[str]:
    yield from TOKENS.values()
    yield from (SALT, WRONG, TICKET_SECRET.decode(), base64.b64encode(TICKET_SECRET).decode())
    for pair in (guarded.server, guarded.pod):
        lines = pair.key.read_text().splitlines()
        yield from (line for line in lines if line and not line.startswith("-----"))


def answers_to_everything(guarded: Guarded) -> Iterator[httpx.Response]:
    """Good calls, calls by the wrong people, and calls that make no sense, at every REST port."""
    for name in REST_NAMES:
        for token in (None, WRONG, TOKENS["rival"], TOKENS["operator"]):
            with guarded.rest(name, token) as client:
                for method, path, body in CALLS[name]:
                    if path.endswith(("drain", "clear")) and token == TOKENS["operator"]:
                        continue
                    yield client.request(method, path, json=body)
                    yield client.request(
                        method,
                        path,
                        content=f"not JSON but {WRONG}",
                        headers={"content-type": "application/json"},
                    )
                    yield client.request(
                        method,
                        f"{path}?token={WRONG}",
                        json={"token": WRONG, "chunk_ids": WRONG, "keys": [WRONG]},
                    )
                for path in (
                    "/metrics",
                    "/readyz",
                    "/healthz",
                    "/openapi.json",
                    "/nothing/" + WRONG,
                ):
                    yield client.get(path)
        with guarded.rest(name, TOKENS["operator"]) as client:
            yield client.request("GET", "/v1/stats")
            yield client.request("GET", "/v1/status")


async def test_no_secret_is_in_answers_or_logs(guarded: Guarded) -> None:
    refusals: list[str] = []
    for name in ("storage", "sidecar"):
        for token in (None, WRONG, TOKENS["acme"]):
            for shown in (None, ticket(), ticket(ttl_ms=-10_000)):
                client = guarded.lm(name, token)
                try:
                    for result in await client.get(
                        [make_key("leak", "acme")], allocate, ticket=shown
                    ):
                        assert not hasattr(result, "memory")
                except LMCacheError as exc:
                    refusals.append(str(exc))
                await client.close()
    wanted = list(secrets_of(guarded))
    assert len(refusals) >= 8
    assert [secret for secret in wanted if secret in "\n".join(refusals)] == []
    num_answers = 0
    for answer in answers_to_everything(guarded):
        num_answers += 1
        said = answer.text + repr(answer.headers)
        assert [secret for secret in wanted if secret in said] == [], (
            f"{answer.request.method} {answer.request.url}"
        )
    assert num_answers > 150
    output = guarded.output
    assert "refused" in output, "the log was written at all"
    assert [secret for secret in [*wanted, ticket().rpartition(".")[0]] if secret in output] == []


def test_actions_of_admins_are_audited_at_any_log_level(guarded: Guarded) -> None:
    def written(name: str) -> list[dict[str, object]]:
        return [
            json.loads(line)
            for line in guarded.services[name].output.splitlines()
            if line.startswith('{"time"')
        ]

    def later(name: str, before: int) -> list[dict[str, object]]:
        """The next three lines, which are written when the answer has been sent."""
        wait_until(lambda: len(written(name)) >= before + 3)
        return written(name)[before:]

    before = len(written("storage"))
    with guarded.rest("storage") as client:
        for token in (TOKENS["operator"], TOKENS["acme"], WRONG):
            client.post(
                "/v1/admin/clear",
                headers={"authorization": f"Bearer {token}"},
                json={"tenant": "unused"},
            )
        client.get(
            f"/v1/chunks/{CHUNK.key.to_url()}",
            headers={"authorization": f"Bearer {TOKENS['acme']}"},
        )
    done, refused, unknown = later("storage", before)
    assert done["what"] == refused["what"] == unknown["what"] == "POST /v1/admin/clear"
    facts = ("who", "tenant", "result", "status")
    assert [[line[fact] for fact in facts] for line in (done, refused, unknown)] == [
        ["operator", "ops", "done", 200],
        ["acme", "acme", "refused", 403],
        [None, None, "refused", 401],
    ]
    assert (done["role"], done["details"], done["instance"]) == (
        "admin",
        {"tenant": "unused"},
        "storage-0",
    )
    with guarded.rest("sidecar", TOKENS["operator"]) as client:
        before = len(written("sidecar"))
        bodies = ({"level": "error", "logger": "lmcache.audit"}, {"level": "error"})
        for body in (*bodies, {"level": "debug"}):
            client.put("/v1/admin/log-level", json=body)
        said = [(line["result"], line["details"]) for line in later("sidecar", before)]
    assert said == [
        ("refused", {"level": "error", "logger": "lmcache.audit"}),
        ("done", {"level": "error"}),
        ("done", {"level": "debug"}),
    ]
