"""`python -m lmcache_webhook.startup_check HOST NAMESPACE AUTHORITY`: wait for the webhook.

The chart runs it after an installation or upgrade: Helm says "deployed" when it ends. It asks for
the review of a pod in that namespace, again and again, and prints why that fails. It trusts the
authority (PEM) alone, as the API server does. Uses only the standard library.
"""

from __future__ import annotations

import base64
import json
import ssl
import sys
import time
from contextlib import closing
from http.client import HTTPException, HTTPSConnection
from typing import Any, Final

PAUSE_S: Final = 1.0
CALL_TIMEOUT_S: Final = 10.0
MAX_ANSWER_BYTES: Final = 1 << 20
INJECTED: Final = "injected:"


def question(namespace: str) -> dict[str, Any]:
    """Return the review of a pod that asks for injection and will not be stored."""
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "startup-check",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "namespace": namespace,
            "operation": "CREATE",
            "dryRun": True,
            "object": {
                "metadata": {"labels": {"lmcache.io/inject": "true"}},
                "spec": {"containers": [{"name": "vllm", "command": ["vllm", "serve", "m"]}]},
            },
        },
    }


def ask(host: str, namespace: str, authority: str) -> str:
    """Return the pod's `lmcache.io/inject-status` after the review.

    Raises:
        OSError: The webhook cannot be reached, or its certificate is not the authority's.
        HTTPException, ValueError: It does not answer as a webhook does, or leaves the pod alone.
    """
    context = ssl.create_default_context(cadata=authority)
    headers = {"Content-Type": "application/json"}
    with closing(HTTPSConnection(host, timeout=CALL_TIMEOUT_S, context=context)) as connection:
        connection.request("POST", "/mutate", json.dumps(question(namespace)), headers)
        answer = connection.getresponse()
        text = answer.read(MAX_ANSWER_BYTES)
    if answer.status != 200:
        raise ValueError(f"it answers {answer.status} {answer.reason}")
    response = json.loads(text)["response"]
    patch = base64.b64decode(response["patch"]) if "patch" in response else b"[]"
    for operation in json.loads(patch):
        if operation["path"].endswith("/lmcache.io~1inject-status"):
            return str(operation["value"])
    raise ValueError("; ".join(response.get("warnings") or ["the pod was left unchanged"]))


def main() -> int:
    """Ask until the webhook injects; its caller bounds the time."""
    host, namespace, authority = sys.argv[1:]
    told = ""
    while True:
        try:
            found = ask(host, namespace, authority)
        except (OSError, HTTPException, ValueError) as exc:
            found = str(exc)
        if found != told:
            print(f"{host}: {found}", flush=True)
            told = found
        if found.startswith(INJECTED):
            return 0
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    sys.exit(main())
