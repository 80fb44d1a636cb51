"""A stand-in for the part of the Kubernetes API that `lmcache-webhook certificate` uses: one
Secret, one webhook configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonpatch
import pytest

from tests.fixtures.http_server import Handler, served

SECRETS = "/api/v1/namespaces/lmcache/secrets"
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


class AdmissionApi:
    """The objects, by path, and how to hurt who asks for them.

    Attributes:
        objects: What there is.
        calls: Method and path of each call.
        refuse: Answer every call with this status.
        race: Called before a Secret is written, as if by somebody else who is quicker.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.refuse: int | None = None
        self.race: list[dict[str, Any]] = []
        self.url = ""
        self._version = 0

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        self.objects[path] = body
        return body

    def configure(self, *names: str) -> dict[str, Any]:
        """A configuration with these webhooks, which trust nobody yet."""
        webhooks = [
            {
                "name": name,
                "clientConfig": {
                    "service": {"name": "hook", "namespace": "lmcache", "path": "/mutate"}
                },
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
            }
            for name in names
        ]
        kind = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
        }
        return self.put(
            f"{CONFIGURATIONS}/hooks", {**kind, "metadata": {"name": "hooks"}, "webhooks": webhooks}
        )

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        self.calls.append(f"{method} {path}")
        if self.refuse is not None:
            return self.refuse, {"kind": "Status", "message": "no"}
        if self.race and method in ("POST", "PUT"):
            self.put(f"{SECRETS}/hook-tls", self.race.pop())
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            return (
                (409, {"kind": "Status"}) if path in self.objects else (201, self.put(path, body))
            )
        there = self.objects.get(path)
        if there is None:
            return 404, {"kind": "Status"}
        if method == "PUT":
            is_same = (
                body["metadata"].get("resourceVersion") == there["metadata"]["resourceVersion"]
            )
            return (200, self.put(path, body)) if is_same else (409, {"kind": "Status"})
        if method == "PATCH":
            try:
                return 200, self.put(path, jsonpatch.apply_patch(there, body))
            except jsonpatch.JsonPatchException as exc:
                return 422, {"kind": "Status", "message": str(exc)}
        return 200, there


@pytest.fixture
def api() -> Iterator[AdmissionApi]:
    made = AdmissionApi()

    class ApiHandler(Handler):
        def _serve(self) -> None:
            self.answer(*made.answer(self.command, self.path.partition("?")[0], self.body()))

        do_GET = do_POST = do_PUT = do_PATCH = _serve

    with served(ApiHandler) as made.url:
        yield made
