"""What the release's NetworkPolicies admit."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tests.cluster.kube import Manifest, name_of

COMPONENT = "app.kubernetes.io/component"


def uncovered(policies: Iterable[Manifest], pods: Iterable[Manifest]) -> list[str]:
    """Return in which direction no policy is for a pod's component, one sentence each."""
    specs = [policy["spec"] for policy in policies]
    return [
        f"no NetworkPolicy is for the {direction} of {name_of(pod)}"
        for pod in pods
        for direction in ("Ingress", "Egress")
        if not any(
            COMPONENT in (spec["podSelector"].get("matchLabels") or {})
            and direction in (spec.get("policyTypes") or [])
            and selects(spec["podSelector"], pod)
            for spec in specs
        )
    ]


def selects(selector: Manifest, pod: Manifest) -> bool:
    """Return whether a selector, which here has labels only, selects a pod."""
    labels = pod["metadata"].get("labels") or {}
    has_labels = (selector.get("matchLabels") or {}).items() <= labels.items()
    return has_labels and not selector.get("matchExpressions")


def addresses(policies: Collection[Manifest], pods: Iterable[Manifest]) -> dict[str, bool]:
    """Return the address of every port of every pod, and whether any pod of the namespace is
    admitted to it.
    """
    found = {}
    for pod in pods:
        admitted = {
            port["port"]
            for policy in policies
            if selects(policy["spec"]["podSelector"], pod)
            for rule in policy["spec"].get("ingress") or []
            if "from" not in rule or {"podSelector": {}} in rule["from"]
            for port in rule.get("ports") or []
        }
        spec, ip = pod["spec"], pod["status"]["podIP"]
        for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
            for port in container.get("ports") or []:
                number = port["containerPort"]
                found[f"{ip}:{number}"] = number in admitted
    return found
