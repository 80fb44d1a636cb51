"""Values that are refused: what no value may be, and what contradicts itself, each with a
sentence of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest

MODEL: Manifest = {"name": "tiny", "model": "example/tiny-llama"}
EXTERNAL: Manifest = {"redis.enabled": False, "externalRedis.url": "redis://r:6379"}
COMPAT: Manifest = {
    "storage.compat.enabled": True,
    "storage.compat.clientsFrom": [{"podSelector": {}}],
}

REFUSED: dict[str, tuple[Manifest, str]] = {
    "an unknown name": ({"storage.replicas": 2}, "replicas"),
    "an unknown option": ({"storage.config.memory_gib": 2}, "memory_gib"),
    "an unknown component": ({"lookups.enabled": True}, "lookups"),
    "a wrong type": ({"lookup.replicaCount": "two"}, "replicaCount"),
    "an unknown name in a model": ({"models": [MODEL | {"gpus": 1}]}, "gpus"),
    "a label that selectors go by": (
        {"commonLabels": {"app.kubernetes.io/name": "mine"}},
        "app.kubernetes.io/name",
    ),
    "a pod's label that selectors go by": (
        {"storage.podLabels": {"app.kubernetes.io/component": "mine"}},
        "app.kubernetes.io/component",
    ),
    "a label that is none": ({"commonLabels": {"team": "the best"}}, "commonLabels"),
    "a model without a name": ({"models": [{"model": "example/tiny"}]}, "name"),
    "a model's name that is no label": ({"models": [MODEL | {"name": "Tiny_1"}]}, "name"),
    "root": ({"security.runAsUser": 0}, "runAsUser"),
    "a digest that is none": ({"broker.image.digest": "sha256:12"}, "digest"),
    "a Redis of another kind": (
        {"redis.enabled": False, "externalRedis.url": "redis+tls://r:6379"},
        "url",
    ),
    "an option that is not the connector's": (
        {"models": [MODEL | {"connector": {"options": {"load": "sync"}}}]},
        "lmcache",
    ),
    "two Redis": ({"externalRedis.url": "redis://r:6379"}, "set redis.enabled=false"),
    "two external Redis": (EXTERNAL | {"externalRedis.existingSecret": "s"}, "give one of them"),
    "no Redis": ({"redis.enabled": False}, "lookup needs a Redis"),
    "files for the bundled Redis": (
        {"externalRedis.tls.existingSecret": "s"},
        "those files are for a Redis of your own",
    ),
    "files for a Redis without TLS": (
        EXTERNAL | {"externalRedis.tls.existingSecret": "s"},
        "write rediss for redis",
    ),
    "a sentinels' user without a password": (
        {
            "redis.enabled": False,
            "externalRedis.existingSecret": "s",
            "externalRedis.sentinel.username": "u",
        },
        "name the Secret with its password",
    ),
    "a sentinels' password without sentinels": (
        EXTERNAL | {"externalRedis.sentinel.existingSecret": "s"},
        "no sentinels are asked",
    ),
    "a lookup without a broker": ({"broker.enabled": False}, "enable both or neither"),
    "costs of pods that nobody sees": (
        {"broker.podDeletionCost.enabled": True, "broker.discovery.enabled": False},
        "needs broker.discovery",
    ),
    "rights for every pod": (
        {"broker.serviceAccount.create": False},
        "would be those of every pod without one",
    ),
    "a disk tier larger than its volume": ({"storage.config.disk_gb": 51}, "must fit its volume"),
    "a token Secret without auth": (
        {"auth.enabled": False, "auth.existingSecret": "s"},
        "enable auth",
    ),
    "memory beside its size": (
        {"storage.resources.limits.memory": "1Gi"},
        "follows from the size of the cache",
    ),
    "a sidecar's memory beside its size": (
        {"models": [MODEL | {"sidecar": {"resources": {"limits": {"memory": "1Gi"}}}}]},
        "follows from the size of the cache",
    ),
    "no CPU request": (
        {"lookup.resources.requests": {"cpu": None}},
        "lookup.resources requests no cpu",
    ),
    "no CPU request of a model": (
        {"models": [MODEL | {"resources": {"requests": {"cpu": ""}}}]},
        "models (tiny).resources requests no cpu",
    ),
    "no CPU request of a sidecar": (
        {"models": [MODEL | {"sidecar": {"resources": {"requests": {"cpu": ""}}}}]},
        "models (tiny): sidecar.resources requests no cpu",
    ),
    "a CPU request of nothing": (
        {"broker.resources.requests.cpu": "0m"},
        "broker.resources requests no cpu",
    ),
    "no CPU request of the test": (
        {"releaseTest.resources.requests": {"cpu": None}},
        "releaseTest.resources requests no cpu",
    ),
    "an amount that is none": ({"broker.resources.limits.memory": "512MB"}, "memory"),
    "an amount below nothing": ({"broker.resources.limits.cpu": -1}, "cpu"),
    "two models of one name": ({"models": [MODEL, MODEL]}, "two entries are named"),
    "one account created twice": (
        {"modelDefaults.serviceAccount.name": "gpu", "models": [MODEL, MODEL | {"name": "other"}]},
        "would create the service account",
    ),
    "a storage that is killed while it drains": (
        {"storage.config.drain_timeout_s": 38},
        "storage.terminationGracePeriodSeconds is 120, but a pod may take 121 s",
    ),
    "a lookup that is killed while it answers": (
        {"lookup.preStopSeconds": 30},
        "lookup.terminationGracePeriodSeconds is 60, but a pod may take 70 s",
    ),
    "a sidecar that is killed while it drains": (
        {"models": [MODEL | {"sidecar": {"config": {"drain_timeout_s": 50}}}]},
        "models (tiny).terminationGracePeriodSeconds is 180, but a pod may take 200 s",
    ),
    "a wait longer than the longest": (
        {"models": [MODEL | {"stop": {"graceSeconds": 90}}]},
        "above stop.maxSeconds",
    ),
    "a PYTHONPATH that hides the connector": (
        {"models": [MODEL | {"extraEnv": [{"name": "PYTHONPATH", "value": "/x"}]}]},
        "set connector.pythonPath instead",
    ),
    "a second connector": (
        {"models": [MODEL | {"extraArgs": ["--kv-transfer-config", "{}"]}]},
        "models (tiny): extraArgs has --kv-transfer-config, but one vLLM has one connector",
    ),
    "a second connector in the command": (
        {"models": [MODEL | {"command": ["vllm", "serve", "--kv-transfer-config={}"]}]},
        "models (tiny): command has --kv-transfer-config={}, but",
    ),
    "a second connector by its members": (
        {"modelDefaults.extraArgs": ["--kv_transfer_config.kv_role=kv_both"], "models": [MODEL]},
        "one vLLM has one connector",
    ),
    "vLLM's own offloading": (
        {"models": [MODEL | {"extraArgs": ["--kv-offloading-size=10"]}]},
        "one vLLM has one connector",
    ),
    "a vLLM over several nodes": (
        {"models": [MODEL | {"extraArgs": ["--pipeline-parallel-size", "2", "--nnodes", "2"]}]},
        "models (tiny): extraArgs has --nnodes 2, which starts one vLLM on several nodes",
    ),
    "a vLLM over several nodes in one word": (
        {"models": [MODEL | {"extraArgs": ["--node-rank=1"]}]},
        "extraArgs has --node-rank=1, which",
    ),
    "a vLLM over several nodes by its command": (
        {"models": [MODEL | {"command": ["nice", "-n", "5", "/bin/vllm", "serve", "-n", "2"]}]},
        "models (tiny): command has -n 2, which starts",
    ),
    "a vLLM over several nodes by its module": (
        {
            "models": [
                MODEL
                | {"command": ["python3", "-m", "vllm.entrypoints.openai.api_server", "--headless"]}
            ]
        },
        "models (tiny): command has --headless, which starts",
    ),
    "a vLLM over several nodes by Ray": (
        {"models": [MODEL | {"extraArgs": ["--distributed-executor-backend", "ray"]}]},
        "on several nodes",
    ),
    "LMCache clients without a policy": (
        COMPAT | {"networkPolicy.enabled": False},
        "nothing else keeps strangers from that port",
    ),
    "LMCache clients from nowhere": (
        {"storage.compat.enabled": True},
        "name the pods that run LMCache",
    ),
    "LMCache clients as our own tenant": (
        COMPAT | {"storage.compat.tenant": "default"},
        "a tenant of their own",
    ),
    "keys of no bucket": (
        {"storage.s3.existingSecret": "s"},
        "storage.s3.existingSecret is set, but storage.s3.bucket is empty",
    ),
    "ports of no bucket": (
        {"storage.s3.extraPorts": [80]},
        "storage.s3.extraPorts is set, but storage.s3.bucket is empty",
    ),
    "an authority of a bucket without TLS": (
        {"storage.s3": {"bucket": "kv", "endpointUrl": "http://s3", "existingCaSecret": "s"}},
        "write https for http in it",
    ),
    "a prefix that is part of a name": (
        {"storage.s3": {"bucket": "kv", "prefix": "team"}},
        "prefix",
    ),
    "credentials in a URL": (
        {"storage.s3": {"bucket": "kv", "endpointUrl": "https://key:secret@s3"}},
        "endpointUrl",
    ),
    "clients' certificates without TLS": ({"tls.mutual": True}, "tls.mutual is set, but"),
    "certificates without TLS": (
        {"tls.certManager.enabled": True},
        "tls.certManager is enabled, but",
    ),
    "two kinds of certificates": (
        {"tls.enabled": True, "tls.certManager.enabled": True, "tls.existingSecrets.redis": "s"},
        "choose one of them",
    ),
    "certificates that nobody signs": (
        {"tls.enabled": True, "tls.certManager.enabled": True},
        "name the Issuer",
    ),
    "TLS without certificates": (
        {
            "tls.enabled": True,
            "tls.existingSecrets": {"storage": "a", "lookup": "b", "sidecar": "c", "redis": "d"},
        },
        "there is no certificate for broker",
    ),
}
OF_ONE_SENTENCE = {
    "a second connector by its members": "a second connector",
    "vLLM's own offloading": "a second connector",
    "a vLLM over several nodes in one word": "a vLLM over several nodes",
    "a vLLM over several nodes by Ray": "a vLLM over several nodes",
    "a vLLM over several nodes by its command": "a vLLM over several nodes",
    "a vLLM over several nodes by its module": "a vLLM over several nodes",
    "a second connector in the command": "a second connector",
    "a lookup that is killed while it answers": "a storage that is killed while it drains",
    "a sidecar that is killed while it drains": "a storage that is killed while it drains",
    "a CPU request of nothing": "no CPU request",
    "no CPU request of the test": "no CPU request",
    "no CPU request of a model": "no CPU request",
    "ports of no bucket": "keys of no bucket",
    "no CPU request of a sidecar": "no CPU request",
    "a sidecar's memory beside its size": "memory beside its size",
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_refused(chart: Chart, what: str) -> None:
    values, sentence = REFUSED[what]
    assert sentence in chart.refuse(values)


@pytest.mark.parametrize(
    "model",
    [
        {"connector": {"enabled": False}, "extraArgs": ["--kv-transfer-config", "{}"]},
        {
            "extraArgs": [
                "--pipeline-parallel-size",
                "2",
                "--distributed-executor-backend",
                "mp",
                "--kv-cache-dtype",
                "fp8",
            ]
        },
    ],
)
def test_a_connector_of_ones_own_and_several_gpus_of_a_node_are_taken(
    chart: Chart, model: Manifest
) -> None:
    args = next(
        one["args"]
        for name, one in chart.render({"models": [MODEL | model]}).containers()
        if name.endswith("/vllm")
    )
    assert args[-len(model["extraArgs"]) :] == model["extraArgs"]


@pytest.mark.parametrize(
    "model",
    [
        {"command": ["nice", "-n", "5", "vllm", "serve"]},
        {
            "command": [
                "torchrun",
                "--nnodes",
                "2",
                "--headless",
                "x",
                "-m",
                "vllm.entrypoints.openai.api_server",
            ]
        },
        {"command": ["vllm", "serve", "--nnodes=1"], "extraArgs": ["-n", "1", "--node-rank", "0"]},
        {"extraArgs": ["--nnodes", "1", "--node_rank=0", "--master-addr", "127.0.0.1"]},
        {"extraArgs": ["--chat-template", "say -n something"]},
        {"extraArgs": ["--chat-template", "{{ '--nnodes 2' }} --headless "]},
    ],
    ids=str,
)
def test_one_node_is_taken(chart: Chart, model: Manifest) -> None:
    found = next(
        one
        for name, one in chart.render({"models": [MODEL | model]}).containers()
        if name.endswith("/vllm")
    )
    assert found["command"] == model.get("command", found["command"])
    extra = model.get("extraArgs", [])
    assert found["args"][len(found["args"]) - len(extra) :] == extra


@pytest.mark.parametrize("helm", ["helm3", "helm4"])
def test_without_a_registry_one_sentence_says_what_is_missing(chart: Chart, helm: str) -> None:
    """Nodes would look for the images at Docker Hub, where they are not."""
    answer = chart.template({"images.registry": ""}, (), helm)
    assert answer.returncode != 0
    assert (
        "images.registry is empty, and the images of this project are in no public registry: build"
        " and push them" in answer.stderr
    )
    own = {f"{name}.image.registry": "mine" for name in ("storage", "lookup", "broker")}
    assert chart.template(own | {"images.registry": ""}, (), helm).returncode == 0, (
        "each may have its own"
    )


def test_a_fraction_is_a_number(chart: Chart) -> None:
    """`--set` makes a string of it, which README says."""
    rendering = chart.render({"storage.config.memory_gb": 0.5})
    assert "memory_gb: 0.5" in rendering.get("ConfigMap", "storage")["data"]["config.yaml"]
    answer = chart.run(
        "template", "cache", str(chart.path), "--set", "storage.config.memory_gb=0.5"
    )
    assert "memory_gb" in answer.stderr
    assert "number" in answer.stderr
    readme = " ".join((chart.path / "README.md").read_text(encoding="utf-8").split())
    assert "`--set` passes 0.5 as a string" in readme


def test_every_contradiction_is_tested(chart: Chart) -> None:
    """As many sentences are expected above as requirements.yaml can fail with; test_names.py and
    test_upgrades.py have one each.
    """
    templates = [
        chart.path / "templates" / name for name in ("requirements.yaml", "_requirements.tpl")
    ]
    told = {
        what
        for what, (_, sentence) in REFUSED.items()
        if " " in sentence and what not in OF_ONE_SENTENCE
    }
    assert len(told) + 2 == sum(
        template.read_text(encoding="utf-8").count("{{- fail ") for template in templates
    )


def test_certificates_are_asked_for_of_what_is_installed_only(chart: Chart) -> None:
    alone = {"lookup.enabled": False, "broker.enabled": False, "redis.enabled": False}
    chart.render(
        alone | {"tls.enabled": True, "tls.existingSecrets": {"storage": "a", "sidecar": "c"}}
    )
