"""What every pod promises, wherever it comes from; each broken promise yields a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from tests.cluster.kube import Manifest, name_of

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
VOLUMES |= {"projected", "secret"}
"""Kinds of volume that the `restricted` standard admits."""
SECCOMP = ("RuntimeDefault", "Localhost")


def probe_problems(pod: Manifest) -> list[str]:
    """Return which containers the kubelet does not probe. vLLM serves without its sidecar, so only
    the pod's main containers decide whether it is ready.
    """
    if pod["spec"].get("restartPolicy", "Always") != "Always":
        return []
    main, before = pod["spec"]["containers"], pod["spec"].get("initContainers") or []
    sidecars = [one for one in before if one.get("restartPolicy") == "Always"]
    wanted = [(one, "livenessProbe") for one in [*main, *sidecars]]
    wanted += [(one, "readinessProbe") for one in main]
    return [
        f"{name_of(pod)}/{container['name']} has no {probe}"
        for container, probe in wanted
        if not container.get(probe)
    ]


def security_problems(pod: Manifest) -> list[str]:
    """Return why a pod does not meet the pod security standard `restricted`."""
    spec = pod["spec"]
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    found += [
        f"volume {volume['name']}"
        for volume in spec.get("volumes") or []
        if not set(volume) - {"name"} <= VOLUMES
    ]
    for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
        context = (spec.get("securityContext") or {}) | (container.get("securityContext") or {})
        found += [f"{container['name']}: {what}" for what in _unrestricted(container, context)]
    return [f"{name_of(pod)} is not restricted: {what}" for what in found]


def _unrestricted(container: Manifest, context: Manifest) -> Iterator[str]:
    """Yield what a container may do that it must not; its context includes the pod's."""
    capabilities = context.get("capabilities") or {}
    if context.get("privileged") or context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
        yield "runAsNonRoot"
    if (context.get("seccompProfile") or {}).get("type") not in SECCOMP:
        yield "seccompProfile"
    if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add") or []) - {
        "NET_BIND_SERVICE"
    }:
        yield "capabilities"
    if context.get("procMount", "Default") != "Default":
        yield "procMount"
    if any(port.get("hostPort") for port in container.get("ports") or []):
        yield "hostPort"
