"""What the webhook makes of a pod, and how the API server knows the webhook."""

from __future__ import annotations

from collections.abc import Collection

from tests.cluster.kube import Manifest, name_of

NOT_REVIEWED = "not reviewed"
TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"


def inject_status(pod: Manifest) -> str:
    """Return what the webhook says of a pod."""
    annotations = pod["metadata"].get("annotations") or {}
    return str(annotations.get("lmcache.io/inject-status", NOT_REVIEWED))


def injection_problems(asked: Manifest, made: Manifest) -> list[str]:
    """Return why a pod neither has its sidecar nor is unchanged, as it is without an answer of the
    webhook (docs/injection.md); one sentence each.
    """
    status = inject_status(made)
    added = [one["name"] for one in made["spec"].get("initContainers") or []]
    added = [name for name in added if name.startswith("lmcache-")]
    if status.startswith("injected: "):
        return [] if "lmcache-sidecar" in added else [f"{status!r}, but there is no sidecar"]
    if status != NOT_REVIEWED:
        return [f"the webhook did not inject: {status}"]
    found = [f"{status}, but there is an init container {name}" for name in added]
    for before, after in zip(asked["spec"]["containers"], made["spec"]["containers"], strict=True):
        found += [
            f"{status}, but container {before['name']} has other {member}"
            for member in ("command", "args", "env")
            if (before.get(member) or []) != (after.get(member) or [])
        ]
    return found


def containers_with_api_token(pod: Manifest, containers: Collection[Manifest]) -> list[str]:
    """Return the names of containers that can read the pod's API token."""
    projected = {
        volume["name"]
        for volume in pod["spec"].get("volumes", [])
        if any(
            "serviceAccountToken" in one for one in volume.get("projected", {}).get("sources", [])
        )
    }
    return [
        one["name"]
        for one in containers
        for mount in one.get("volumeMounts", [])
        if mount["mountPath"] == TOKEN_PATH and mount["name"] in projected
    ]


def trust_problems(configuration: Manifest, secret: Manifest) -> list[str]:
    """Return which webhooks the API server would call without trusting their certificate's
    authority, one sentence each.
    """
    authority = secret.get("data", {}).get("ca.crt")
    if not authority:
        return [f"Secret {name_of(secret)} has no ca.crt"]
    return [
        f"{name_of(configuration)}: the caBundle of {one['name']} is not the ca.crt of"
        f" {name_of(secret)}"
        for one in configuration.get("webhooks") or [{"name": "no webhook", "clientConfig": {}}]
        if one["clientConfig"].get("caBundle") != authority
    ]
