"""Objects that the suite adds to the release's namespace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.cluster.names import INJECTED, MODEL, MODEL_SERVICE

FOLDER = Path(__file__).parent
SCRIPTS = ("ask.py", "traffic.py")
TRAFFIC = "cluster-test-traffic"
PLAIN = "cluster-test-plain"
STOP_FILE = "/tmp/stop"
STRANGER = "cluster-test-stranger"
ALONE = "cluster-test-alone"
PULL_SECRET = "cluster-test-pull"
SHARED_MEMORY = "shm"

Manifest = dict[str, Any]


def scripts() -> Manifest:
    """Return the ConfigMap with the traffic's scripts."""
    data = {name: (FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS}
    return {"metadata": {"name": TRAFFIC}, "data": data}


def traffic_pod(hooks: str) -> Manifest:
    """Return the pod that makes traffic: the chart's release test with another script, so that it
    has the same addresses, token and certificates.

    Args:
        hooks: What `helm get hooks` prints.
    """
    (test,) = [
        one
        for one in yaml.safe_load_all(hooks)
        if one and one["metadata"]["annotations"]["helm.sh/hook"] == "test"
    ]
    spec = test["spec"]
    (container,) = spec["containers"]
    container["command"] = ["python", "/opt/traffic/traffic.py"]
    container["args"] += [
        f"--completions-url=http://{MODEL_SERVICE}:8000",
        f"--model={MODEL}",
        f"--stop-file={STOP_FILE}",
    ]
    container["name"] = "traffic"
    container["resources"] = {
        "requests": {"cpu": "50m", "memory": "128Mi"},
        "limits": {"memory": "512Mi"},
    }
    container["volumeMounts"].append(
        {"name": "traffic", "mountPath": "/opt/traffic", "readOnly": True}
    )
    spec["volumes"].append({"name": "traffic", "configMap": {"name": TRAFFIC}})
    spec["activeDeadlineSeconds"] = 3600
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": TRAFFIC, "labels": {"app": TRAFFIC, **INJECTED}},
        "spec": spec,
    }


def pull_secret(config: str) -> Manifest:
    """Return the Secret for a registry that needs a login.

    Args:
        config: Content of a `.docker/config.json`.
    """
    return {
        "metadata": {"name": PULL_SECRET},
        "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": config},
    }


def plain_pod(deployment: Manifest, name: str = ALONE) -> Manifest:
    """Return a pod like a Deployment's, but of its own."""
    template = deployment["spec"]["template"]
    labels = {**template["metadata"]["labels"], "app": name}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": template["spec"],
    }


def stranger_pod(deployment: Manifest, image: str) -> Manifest:
    """Return a pod of an image with Python that does nothing, and that no policy knows."""
    pod = plain_pod(deployment, STRANGER)
    pod["metadata"]["labels"] = {"app": STRANGER}
    (container,) = pod["spec"]["containers"]
    kept = {"imagePullPolicy": container["imagePullPolicy"]}
    kept |= {"securityContext": container["securityContext"]}
    command = ["sleep", "3600"]
    pod["spec"] |= {"containers": [{"name": "main", "image": image, "command": command, **kept}]}
    pod["spec"]["terminationGracePeriodSeconds"] = 0
    return pod


def fence() -> Manifest:
    """Return a NetworkPolicy that lets the stranger reach nothing."""
    spec = {"podSelector": {"matchLabels": {"app": STRANGER}}, "policyTypes": ["Egress"]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": STRANGER},
        "spec": spec,
    }


def plain_deployment(
    image: str, pull_policy: str = "IfNotPresent", pull_secret: str = ""
) -> Manifest:
    """Return a vLLM Deployment as used without this project, plus the label that requests the
    cache.
    """
    labels = {"app": PLAIN}
    command = ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    arguments = ["--model", MODEL, "--port", "8000", "--enforce-eager", "--dtype", "float32"]
    arguments += ["--max-model-len", "8192", "--enable-prompt-tokens-details"]
    container = {
        "name": "engine",
        "image": image,
        "imagePullPolicy": pull_policy,
        "command": command,
        "args": arguments,
        "ports": [{"containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "200m", "memory": "3Gi"}, "limits": {"memory": "4Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}],
    }
    # As the chart's `shmSize`: vLLM does not start with the 64 MiB that Kubernetes gives.
    shared_memory = {"medium": "Memory", "sizeLimit": "2Gi"}
    pod = {
        "metadata": {"labels": {**labels, "lmcache.io/inject": "true"}},
        "spec": {
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "runAsGroup": 10001,
                "fsGroup": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "terminationGracePeriodSeconds": 120,
            "imagePullSecrets": [{"name": pull_secret}] if pull_secret else [],
            "containers": [container],
            "volumes": [{"name": SHARED_MEMORY, "emptyDir": shared_memory}],
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": PLAIN},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": pod},
    }
