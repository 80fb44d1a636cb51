"""Pods of many shapes get a sidecar, once, and Kubernetes takes what comes out."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from lmcache_core.integrations.vllm import releases
from lmcache_servicekit.settings import load_settings
from lmcache_sidecar.settings import SidecarSettings
from lmcache_webhook.injection.injector import review_pod
from lmcache_webhook.injection.plan import InjectionOptions
from lmcache_webhook.injection.pod import amount_of
from lmcache_webhook.injection.sidecar import PAYLOAD, SIDECAR, offloading_config, transfer_config

from tests.fixtures.pods import (
    CONNECTOR_IN_A_SCRIPT,
    EVENTS_IN_A_SCRIPT,
    SHAPES,
    Pod,
    container,
    plain,
    pod,
)
from tests.fixtures.reviews import STATUS, after, declined, injected

KUBERNETES_VERSIONS = ("1.29", "1.33", "1.37")
LEAST = releases.text_of(releases.LEAST)
LEAST_WITH_TIERS = releases.text_of(releases.LEAST_WITH_TIERS)
every_shape = pytest.mark.parametrize("shape", sorted(SHAPES))
# Of the pod `several_containers` the second container is vLLM's.
ENGINES = {"several_containers": 1}
VOLUMES_OF_RESTRICTED = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}


@pytest.fixture(scope="module", autouse=True)
def schemas_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "kubernetes_validate.utils.schema_contents",
            functools.cache(kubernetes_validate.utils.schema_contents),
        )
        yield


def with_settings(options: InjectionOptions, **changes: object) -> InjectionOptions:
    return dataclasses.replace(options, settings=options.settings.model_copy(update=changes))


def named(items: list[Pod], name: str) -> Pod:
    [found] = [item for item in items if item["name"] == name]
    return found


def engine_of(changed: Pod, shape: str) -> Pod:
    engine: Pod = changed["spec"]["containers"][ENGINES.get(shape, 0)]
    return engine


def text_of(containers: Pod) -> str:
    return " ".join([*(containers.get("command") or []), *(containers.get("args") or [])])


@every_shape
@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_kubernetes_accepts_the_pod(shape: str, version: str, options: InjectionOptions) -> None:
    document = without_nulls(injected(options, SHAPES[shape]()))
    kubernetes_validate.validate(document, version, strict=True)


def without_nulls(value: Any) -> Any:
    """As the API server stores it."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@every_shape
def test_nothing_of_the_pod_is_lost(shape: str, options: InjectionOptions) -> None:
    before = SHAPES[shape]()
    changed = injected(options, copy.deepcopy(before))
    for index, (old, new) in enumerate(
        zip(before["spec"]["containers"], changed["spec"]["containers"], strict=True)
    ):
        if index != ENGINES.get(shape, 0):
            assert new == old
            continue
        # The argument comes last, if it is not there already.
        args = old.get("args") or []
        assert new.get("command") == old.get("command")
        assert (new.get("args") or [])[: len(args)] == args
        same = set(old) - {"command", "args", "env", "volumeMounts"}
        assert {name: new[name] for name in same} == {name: old[name] for name in same}
        assert new["volumeMounts"][: len(old.get("volumeMounts") or [])] == (
            old.get("volumeMounts") or []
        )
        ours = {"PYTHONPATH", "INJECTED_PYTHONPATH"}
        assert [one for one in new["env"] if one["name"] not in ours] == [
            one for one in old.get("env") or [] if one["name"] not in ours
        ]
    assert changed["spec"]["initContainers"][:-2] == (before["spec"].get("initContainers") or [])
    assert changed["spec"]["volumes"][: len(before["spec"].get("volumes") or [])] == (
        before["spec"].get("volumes") or []
    )
    assert changed["metadata"]["labels"] == {
        **before["metadata"]["labels"],
        "lmcache.io/injected": "true",
    }


@every_shape
def test_the_engine_finds_the_connector_and_its_sidecar(
    shape: str, options: InjectionOptions
) -> None:
    changed = injected(options, SHAPES[shape]())
    engine = engine_of(changed, shape)
    sidecar = named(changed["spec"]["initContainers"], SIDECAR)
    assert [one["name"] for one in changed["spec"]["initContainers"]][-2:] == [PAYLOAD, SIDECAR]
    assert sidecar["restartPolicy"] == "Always"
    values = {one["name"]: one.get("value") for one in sidecar["env"]}
    theirs, ours = (
        {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
        for one in (engine, sidecar)
    )
    for path in ("/run/lmcache/arena", "/run/lmcache/socket"):
        assert theirs[path] == ours[path]
    assert "lmcache-credentials" in ours.values()
    assert not {"lmcache-credentials", "lmcache-tls"} & set(theirs.values()), (
        "no secret of the sidecar is vLLM's"
    )
    [path] = [one["value"] for one in engine["env"] if one["name"] == "PYTHONPATH"]
    payload = named(changed["spec"]["initContainers"], PAYLOAD)
    assert path.split(":")[-1] == f"{payload['command'][1]}/python"
    assert theirs["/opt/lmcache"] == payload["volumeMounts"][0]["name"]
    is_worker = shape == "ray_worker"
    assert ("kv-transfer-config" in text_of(engine)) != is_worker
    has_it_already = shape in ("kserve", "leader_worker_set")
    status = changed["metadata"]["annotations"][STATUS]
    assert ("what it runs is not the engine's server itself" in status) == is_worker
    assert ("it names the connector already" in status) == has_it_already
    if not is_worker:
        assert values["LMCACHE_SIDECAR_SOCKET_PATH"] in text_of(engine)
    if not (is_worker or has_it_already):
        assert transfer_of(engine) == transfer_config()
    assert {
        mount["name"] for one in (engine, sidecar, payload) for mount in one["volumeMounts"]
    } <= {volume["name"] for volume in changed["spec"]["volumes"]}


TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"


def admitted(document: Pod) -> Pod:
    """What the API server's ServiceAccount admission makes of a pod, before the webhooks and
    after them.
    """
    changed = copy.deepcopy(document)
    volumes = changed["spec"]["volumes"] = changed["spec"].get("volumes") or []
    if not any(volume["name"].startswith("kube-api-access-") for volume in volumes):
        volumes.append(
            {
                "name": "kube-api-access-x7k2p",
                "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]},
            }
        )
    for one in [*(changed["spec"].get("initContainers") or []), *changed["spec"]["containers"]]:
        mounts = one["volumeMounts"] = one.get("volumeMounts") or []
        if not any(mount["mountPath"] == TOKEN_PATH for mount in mounts):
            mounts.append(
                {"name": "kube-api-access-x7k2p", "readOnly": True, "mountPath": TOKEN_PATH}
            )
    return changed


@every_shape
def test_added_containers_get_no_service_account_token(
    shape: str, options: InjectionOptions
) -> None:
    before = admitted(SHAPES[shape]())
    changed = admitted(injected(options, before))
    for ours in changed["spec"]["initContainers"][-2:]:
        [mount] = [mount for mount in ours["volumeMounts"] if mount["mountPath"] == TOKEN_PATH]
        assert mount == {"name": "lmcache-no-token", "mountPath": TOKEN_PATH, "readOnly": True}
    assert named(changed["spec"]["volumes"], "lmcache-no-token") == {
        "name": "lmcache-no-token",
        "emptyDir": {"sizeLimit": "1Mi"},
    }
    for old, new in zip(before["spec"]["containers"], changed["spec"]["containers"], strict=True):
        assert named(new["volumeMounts"], "kube-api-access-x7k2p") in old["volumeMounts"], (
            "the pod's own keep theirs"
        )


def test_the_payload_has_the_resources_of_the_settings(options: InjectionOptions) -> None:
    given = {"requests": {"cpu": "20m", "memory": "32Mi"}, "limits": {"memory": "96Mi"}}
    options = with_settings(options, payload_resources=given)
    payload = named(injected(options, plain())["spec"]["initContainers"], PAYLOAD)
    assert payload["resources"] == given
    guaranteed = named(
        injected(options, SHAPES["guaranteed"]())["spec"]["initContainers"], PAYLOAD
    )["resources"]
    assert guaranteed["requests"] == guaranteed["limits"] == {"cpu": "20m", "memory": "96Mi"}


@pytest.mark.parametrize(
    ("gpus", "cpu"),
    [({}, "500m"), ({"nvidia.com/gpu": "many"}, "500m"), ({"amd.com/gpu": "1E"}, "48")],
)
def test_the_cpu_request_follows_from_the_gpus_of_vllm_unless_it_is_set(
    gpus: Pod, cpu: str, options: InjectionOptions
) -> None:
    """`tests/helm/test_webhook.py` has the rule for usual numbers of GPUs."""
    other = container("other", image="nginx", resources={"limits": {"nvidia.com/gpu": "4"}})
    document = pod(container(args=["m"], resources={"limits": {"memory": "64Gi"} | gpus}), other)
    assert cpu_of(options, document) == {"requests": cpu}
    explicit = with_settings(options, sidecar_cpu="3")
    assert cpu_of(explicit, document) == {"requests": "3"}
    template = {"resources": {"requests": {"cpu": "100m"}}}
    assert cpu_of(dataclasses.replace(explicit, sidecar_template=template), document) == {
        "requests": "100m"
    }


def cpu_of(options: InjectionOptions, document: Pod) -> Pod:
    """The sidecar's request and limit of CPU."""
    sidecar = named(injected(options, document)["spec"]["initContainers"], SIDECAR)
    return {
        part: amounts["cpu"] for part, amounts in sidecar["resources"].items() if "cpu" in amounts
    }


@every_shape
def test_added_containers_are_restricted(shape: str, options: InjectionOptions) -> None:
    changed = injected(options, SHAPES[shape]())
    for ours in changed["spec"]["initContainers"][-2:]:
        context = ours["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {"cpu", "memory"} <= set(ours["resources"]["requests"]), (
            "else an HPA or a quota gets stuck"
        )
        assert "memory" in ours["resources"]["limits"]
        assert not any("hostPort" in port for port in ours.get("ports", []))
    added = [
        volume for volume in changed["spec"]["volumes"] if volume["name"].startswith("lmcache-")
    ]
    assert {kind for volume in added for kind in volume if kind != "name"} <= VOLUMES_OF_RESTRICTED


@every_shape
def test_the_sidecars_own_settings_take_its_variables(
    shape: str, options: InjectionOptions
) -> None:
    changed = injected(options, SHAPES[shape](), "team-a")
    settings = settings_of(changed)
    assert settings.instance_id == "team-a.model-7d9f-x"
    assert settings.tenant == "a"
    assert settings.drain_timeout_s == 15
    assert settings.tls_cert_file is not None
    assert settings.lm_host == "10.1.2.3"
    assert settings.arena_gb == 4


def settings_of(changed: Pod) -> SidecarSettings:
    """What the sidecar makes of its variables, once Kubernetes has filled them in."""
    fields = {
        "POD_NAME": "model-7d9f-x",
        "POD_NAMESPACE": "team-a",
        "POD_UID": "0" * 32,
        "POD_IP": "10.1.2.3",
    }
    environ = dict(fields)
    for one in named(changed["spec"]["initContainers"], SIDECAR)["env"]:
        value = one.get("value", fields.get(one["name"], "node-1"))
        for name, text in fields.items():
            value = value.replace(f"$({name})", text)
        environ[one["name"]] = value
    return load_settings(SidecarSettings, None, environ)


def test_one_value_sizes_arena_volume_and_memory(options: InjectionOptions) -> None:
    asked = pod(
        container(args=["m"]),
        annotations={"lmcache.io/arena-gb": "16.5", "lmcache.io/disk-gb": "50"},
    )
    changed = injected(options, asked)
    sidecar = named(changed["spec"]["initContainers"], SIDECAR)
    arena = named(changed["spec"]["volumes"], "lmcache-arena")["emptyDir"]
    assert arena == {"medium": "Memory", "sizeLimit": f"{int(16.5 * 1024) + 64}Mi"}
    assert (
        sidecar["resources"]["limits"]["memory"]
        == sidecar["resources"]["requests"]["memory"]
        == f"{int(16.5 * 1024) + 512 + 66}Mi"
    ), "arena, overhead and page tables"
    assert named(changed["spec"]["volumes"], "lmcache-disk")["emptyDir"] == {"sizeLimit": "56Gi"}
    settings = settings_of(changed)
    assert (settings.arena_gb, settings.disk_gb, str(settings.disk_path)) == (
        16.5,
        50,
        "/var/lib/lmcache/chunks",
    )


@pytest.mark.parametrize(
    ("requests", "limits", "is_guaranteed"),
    [
        ({"cpu": "8000m", "memory": "64Gi"}, {"cpu": "8", "memory": "65536Mi"}, True),
        ({}, {"cpu": 8, "memory": "64Gi"}, True),
        ({"cpu": "7999m"}, {"cpu": "8", "memory": "64Gi"}, False),
    ],
)
@pytest.mark.parametrize("over", [{}, {"requests": {"cpu": "1"}, "limits": {"cpu": "3"}}])
def test_guaranteed_pod_stays_guaranteed(
    requests: Pod, limits: Pod, is_guaranteed: bool, over: Pod, options: InjectionOptions
) -> None:
    document = pod(container(args=["m"], resources={"requests": requests, "limits": limits}))
    changed = injected(
        dataclasses.replace(options, sidecar_template={"resources": over} if over else {}), document
    )
    for ours in changed["spec"]["initContainers"]:
        asked, most = ours["resources"]["requests"], ours["resources"]["limits"]
        assert (asked == most) == is_guaranteed
        assert "cpu" not in most or amount_of(asked["cpu"]) <= amount_of(most["cpu"])


@pytest.mark.parametrize(
    ("document", "user"),
    [
        (SHAPES["restricted"](), 2000),
        (plain(), 10001),
        (SHAPES["host_ipc"](), 10001),  # root: may open the sidecar's files anyway
        (pod(container(args=["m"]), annotations={"lmcache.io/run-as-user": "1000"}), 1000),
    ],
)
def test_sidecar_and_engine_are_one_user(
    document: Pod, user: int, options: InjectionOptions
) -> None:
    for ours in injected(options, document)["spec"]["initContainers"][-2:]:
        assert ours["securityContext"]["runAsUser"] == user


def test_python_paths_are_kept(options: InjectionOptions) -> None:
    plain_path = injected(options, SHAPES["existing_python_path"]())["spec"]["containers"][0]["env"]
    assert plain_path == [{"name": "PYTHONPATH", "value": "/plugins:/opt/lmcache/python"}]
    variables = injected(options, SHAPES["python_path_from_elsewhere"]())["spec"]["containers"][0][
        "env"
    ]
    assert [one["name"] for one in variables] == ["A", "INJECTED_PYTHONPATH", "PYTHONPATH"]
    assert variables[1]["valueFrom"] == {"configMapKeyRef": {"name": "c", "key": "path"}}
    assert variables[2] == {
        "name": "PYTHONPATH",
        "value": "$(INJECTED_PYTHONPATH):/opt/lmcache/python",
    }


OFFLOADING = {"lmcache.io/connector": "offloading-tier", "lmcache.io/host-memory-gb": "4"}


def transfer_of(engine: Pod) -> Any:
    assert engine["args"][-2] == "--kv-transfer-config"
    return json.loads(engine["args"][-1])


@pytest.mark.parametrize(
    ("default", "annotations", "host_gb"),
    [
        ("lmcache", {}, 0),
        ("lmcache", OFFLOADING, 4),
        ("offloading-tier", {}, 3),
        ("offloading-tier", {"lmcache.io/connector": "lmcache"}, 0),
    ],
)
def test_a_pod_chooses_its_connector(
    default: str, annotations: dict[str, str], host_gb: float, options: InjectionOptions
) -> None:
    """And gets the memory for it: without a volume, /dev/shm has 64 MiB."""
    options = with_settings(options, connector=default, host_memory_gb=3.0)
    changed = injected(options, pod(container(args=["m"]), annotations=annotations))
    [engine] = changed["spec"]["containers"]
    mounts = [mount for mount in engine["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    if not host_gb:
        assert transfer_of(engine) == transfer_config()
        assert mounts == []
        return
    assert transfer_of(engine) == offloading_config(host_gb)
    assert transfer_of(engine)["kv_connector_extra_config"]["cpu_bytes_to_use"] == host_gb * 2**30
    [mount] = mounts
    assert named(changed["spec"]["volumes"], mount["name"])["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": f"{int(host_gb * 1024) + 2048}Mi",
    }
    for version in KUBERNETES_VERSIONS:
        kubernetes_validate.validate(without_nulls(changed), version, strict=True)


@every_shape
def test_host_memory_is_added_to_vllms(shape: str, options: InjectionOptions) -> None:
    """To that container alone, where it has a bound."""
    before = SHAPES[shape]()
    before["metadata"]["annotations"] = (before["metadata"].get("annotations") or {}) | OFFLOADING
    engine = engine_of(before, shape)
    changed = injected(options, before)
    for old, new in zip(before["spec"]["containers"], changed["spec"]["containers"], strict=True):
        for part in ("requests", "limits"):
            was, now = (one.get("resources", {}).get(part) for one in (old, new))
            if old is not engine or "memory" not in (was or {}):
                assert now == was
                continue
            assert amount_of(now["memory"]) - amount_of(was["memory"]) == 4 << 30
            assert {**now, "memory": was["memory"]} == was
    has_node_s = before["spec"].get("hostIPC", False)
    mounted = [mount["mountPath"] for mount in engine_of(changed, shape)["volumeMounts"]]
    assert mounted.count("/dev/shm") == (0 if has_node_s else 1)
    kubernetes_validate.validate(without_nulls(changed), KUBERNETES_VERSIONS[-1], strict=True)


@pytest.mark.parametrize(
    ("volume", "after_it"),
    [
        (
            {"emptyDir": {"medium": "Memory", "sizeLimit": "20Gi"}},
            {"emptyDir": {"medium": "Memory", "sizeLimit": "24576Mi"}},
        ),
        ({"hostPath": {"path": "/dev/shm"}}, {"hostPath": {"path": "/dev/shm"}}),
    ],
)
def test_a_volume_at_dev_shm_is_enlarged(
    volume: Pod, after_it: Pod, options: InjectionOptions
) -> None:
    document = pod(
        container(args=["m"], volumeMounts=[{"name": "dshm", "mountPath": "/dev/shm/"}]),
        annotations=OFFLOADING,
        volumes=[{"name": "other", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "dshm", **volume}],
    )
    changed = injected(options, document)
    assert changed["spec"]["volumes"][:2] == [
        {"name": "other", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "dshm", **after_it},
    ]
    assert "lmcache-shm" not in json.dumps(changed)


def test_a_connector_in_a_script_has_its_memory_from_its_author(options: InjectionOptions) -> None:
    options = with_settings(options, connector="offloading-tier")
    changed = injected(options, SHAPES["kserve"]())
    assert "lmcache-shm" not in json.dumps(changed)
    document = SHAPES["kserve"]()
    document["metadata"]["annotations"] |= OFFLOADING
    assert "lmcache-shm" in json.dumps(injected(options, document))


def publishing(options: InjectionOptions, **changes: object) -> InjectionOptions:
    return with_settings(options, **{"kv_events_port": 5557} | changes)


@pytest.mark.parametrize("annotations", [{}, OFFLOADING], ids=["lmcache", "offloading-tier"])
def test_vllm_publishes_for_routers(annotations: dict[str, str], options: InjectionOptions) -> None:
    options = publishing(options, kv_events_port=6000, kv_events_replay_port=6001)
    document = pod(container(args=["m"], ports=[{"containerPort": 8000}]), annotations=annotations)
    changed = injected(options, document)
    [engine] = changed["spec"]["containers"]
    assert engine["args"][:2] == ["m", "--kv-transfer-config"]
    extra = json.loads(engine["args"][2])["kv_connector_extra_config"]
    if annotations:
        assert extra["self_describing_kv_events"] is True
        assert extra["secondary_tiers"][0]["enable_kv_events"] is True
    else:
        assert extra["kv_events"] is True
    assert engine["args"][3] == "--kv-events-config"
    assert json.loads(engine["args"][4]) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:6000",
        "replay_endpoint": "tcp://*:6001",
    }
    assert [one["containerPort"] for one in engine["ports"]] == [8000, 6000, 6001]
    assert changed["metadata"]["annotations"][STATUS].endswith(
        "; routers learn of its cache at port 6000"
    )
    for version in KUBERNETES_VERSIONS:
        kubernetes_validate.validate(without_nulls(changed), version, strict=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kv-events-config", '{"enable_kv_cache_events": true, "publisher": "zmq"}'], ""),
        (['--kv_events_config={"enable_kv_cache_events": true, "topic": "kv@a@m"}'], ""),
        (["--kv-events-config", '{"enable_kv_cache_events": false}'], "does not publish by zmq"),
        (
            ['--kv-events-config={"enable_kv_cache_events": true, "publisher": "null"}'],
            "does not publish by zmq",
        ),
        (["--kv-events-config.enable_kv_cache_events=true"], "cannot be read here"),
        (["--kv-events-config", "["], "cannot be read here"),
        (["--kv-events-config=[]"], "cannot be read here"),
        (["--kv-events-config={}", "--kv-events-config={}"], "cannot be read here"),
    ],
)
def test_events_that_a_pod_publishes_already_are_its_own(
    words: list[str], said: str, options: InjectionOptions
) -> None:
    """The connector joins them only if vLLM would then start."""
    changed = injected(publishing(options), pod(container(args=["m", *words])))
    [engine] = changed["spec"]["containers"]
    assert engine["args"][:-2] == ["m", *words]
    assert ("kv_events" in transfer_of(engine)["kv_connector_extra_config"]) == (not said)
    assert "ports" not in engine
    status = changed["metadata"]["annotations"][STATUS]
    assert (said or "learn of its cache where it publishes already") in status


@pytest.mark.parametrize("port", [5557, 8084], ids=["another container's", "the sidecar's"])
def test_events_get_no_port_that_is_taken(port: int, options: InjectionOptions) -> None:
    other = {"name": "x", "image": "x", "ports": [{"containerPort": 5557}]}
    publishes = publishing(options, kv_events_port=port)
    changed = injected(publishes, pod(container(args=["m"]), other))
    assert transfer_of(changed["spec"]["containers"][0]) == transfer_config()
    assert f"the pod has a port {port} already" in changed["metadata"]["annotations"][STATUS]


@pytest.mark.parametrize(("port", "is_told"), [(5557, True), (6000, False)])
def test_events_go_through_a_script_in_plain_words(
    port: int, is_told: bool, options: InjectionOptions
) -> None:
    script = pod(container(command=["sh", "-c", "vllm serve m $VLLM_ADDITIONAL_ARGS"]))
    changed = injected(publishing(options, kv_events_port=port), script)
    [engine] = changed["spec"]["containers"]
    words = named(engine["env"], "VLLM_ADDITIONAL_ARGS")["value"].split()
    assert words[: len(CONNECTOR_IN_A_SCRIPT.split())] == CONNECTOR_IN_A_SCRIPT.split()
    assert words[len(CONNECTOR_IN_A_SCRIPT.split()) :] == (EVENTS_IN_A_SCRIPT if is_told else [])
    assert [one["containerPort"] for one in engine.get("ports", [])] == ([port] if is_told else [])
    said = "its script takes no ports but vLLM's own, 5557 without replay"
    assert (said in changed["metadata"]["annotations"][STATUS]) != is_told


@pytest.mark.parametrize(
    ("shape", "said"),
    [("kserve", "it names the connector already"), ("ray_worker", "the engine's")],
)
def test_a_pod_whose_command_line_stays_publishes_nothing_more(
    shape: str, said: str, options: InjectionOptions
) -> None:
    quiet, changed = (injected(one, SHAPES[shape]()) for one in (options, publishing(options)))
    assert changed == quiet
    assert said in changed["metadata"]["annotations"][STATUS]


def test_ray_is_told_what_makes_its_vllm_publish(options: InjectionOptions) -> None:
    document = pod(
        container("ray", command=["ray", "start"]), annotations={"lmcache.io/container": "ray"}
    )
    status = injected(publishing(options), document)["metadata"]["annotations"][STATUS]
    assert '"kv_events": true' in status
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    assert status.endswith(f", kv_events_config: {json.dumps(events)}")


@pytest.mark.parametrize(
    ("namespace", "annotation", "tenant", "secret"),
    [("team-a", None, "a", "cred"), ("team-a", "b", "b", "cred-b")],
)
def test_pods_have_their_namespaces_tenants(
    namespace: str, annotation: str | None, tenant: str, secret: str, options: InjectionOptions
) -> None:
    document = pod(
        container(args=["m"]), annotations={"lmcache.io/tenant": annotation} if annotation else None
    )
    changed = injected(options, document, namespace)
    sources = named(changed["spec"]["volumes"], "lmcache-credentials")["projected"]["sources"]
    assert sources[0]["secret"]["name"] == secret
    assert f"tenant {tenant}" in changed["metadata"]["annotations"][STATUS]


@pytest.mark.parametrize(("namespace", "is_found"), [("team-a", True), ("team-b", False)])
def test_the_broker_finds_pods_of_its_namespace(
    namespace: str, is_found: bool, options: InjectionOptions
) -> None:
    """By the label that its Service selects and by the pod's name. Of another tenant it would
    think that they are the first's.
    """
    options = with_settings(
        options, kubernetes_service="cache-sidecars", kubernetes_namespace="team-a"
    )
    document = pod(container(args=["m"]))
    changed = after(document, review_pod(options, document, namespace))
    assert changed["metadata"]["labels"].get("lmcache.io/sidecars") == (
        "cache-sidecars" if is_found else None
    )
    assert instance_id(changed) == ("$(POD_NAME)" if is_found else "$(POD_NAMESPACE).$(POD_NAME)")


def instance_id(changed: Pod) -> str:
    env = named(changed["spec"]["initContainers"], SIDECAR)["env"]
    text: str = named(env, "LMCACHE_SIDECAR_INSTANCE_ID")["value"]
    return text


def test_an_instance_id_that_would_be_too_long_is_the_pods_uid(options: InjectionOptions) -> None:
    document = plain()
    document["metadata"]["generateName"] = "m" * 115
    assert instance_id(injected(options, document)) == "$(POD_UID)"


def asking(**annotations: str) -> Pod:
    names = {f"lmcache.io/{name.replace('__', '-')}": text for name, text in annotations.items()}
    return pod(container(), annotations=names)


def mounting(path: str, **more: bool) -> Pod:
    return pod(container(volumeMounts=[{"name": "x", "mountPath": path, **more}]))


def having(name: str, value: str) -> Pod:
    return pod(container(env=[{"name": name, "value": value}]))


BUSY_PORT = {"name": "x", "image": "x", "ports": [{"containerPort": 8084}]}
ARENA_VOLUME = {"name": "lmcache-arena", "emptyDir": {}}


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (
            pod(container(image="nginx:1")),
            "looks as if it ran vLLM or SGLang: name the one that does in",
        ),
        (
            pod(container("a"), container("b")),
            "the containers a and b look as if they ran an engine",
        ),
        (asking(container="x"), "no container 'x', which lmcache.io/container names: it has vllm"),
        (pod(container(args=["--kv_transfer_config={}"])), "--kv_transfer_config already"),
        (having("LMCACHE_CHUNK_SIZ", "256"), "options that the connector cannot read"),
        (pod(container(command=["sh", "-c", "a; vllm serve m"])), "its engine in a shell script"),
        (pod(container(), hostNetwork=True), "leave hostNetwork out"),
        (pod(container(), os={"name": "windows"}), "the sidecar runs on Linux"),
        (pod(container(), resources={"limits": {"memory": "64Gi"}}), "spec.resources"),
        (pod(container(), volumes=[ARENA_VOLUME]), "a volume lmcache-arena already"),
        (mounting("//run//lmcache/./arena"), "a mount //run//lmcache/./arena already"),
        (mounting("/opt", readOnly=True), "a read-only mount /opt, below which"),
        (pod(container(), BUSY_PORT), "a port 8084 already"),
        (pod(container(), {"name": PAYLOAD}), "a container lmcache-payload already"),
        (asking(arena__gb="nan"), "lmcache.io/arena-gb='nan': write a number from"),
        (asking(arena__gb="65"), "above the 64 that the webhook gives a pod"),
        (asking(disk__gb="-1"), "write a number from 0"),
        (asking(connector=""), "lmcache.io/connector='': write lmcache or offloading-tier"),
        (asking(host__memory__gb="0"), "lmcache.io/host-memory-gb='0': write a number from 0.06"),
        (asking(run__as__user="1.5"), "write a whole number"),
        (asking(arena_gb="4"), "did you mean lmcache.io/arena-gb?"),
        (asking(tenant="No Tenant"), "lmcache.io/tenant='No Tenant'"),
        (asking(tenant="open"), "is not a tenant of the namespace team-a: its tenants are a, b"),
    ],
)
def test_pods_that_cannot_be_injected(document: Pod, text: str, options: InjectionOptions) -> None:
    reason = declined(options, document)
    assert reason.startswith("not injected: ")
    assert text in reason


@pytest.mark.parametrize(
    ("image", "release"),
    [
        ("vllm/vllm-openai:v0.11.0@sha256:" + "0" * 64, "0.11.0"),
        ("registry.example.com:5000/team/vllm-openai:v0.11.0-cu129", "0.11.0"),
        ("rocm/vllm:rocm7.0.0_vllm_0.11.0_20251111", "0.11.0"),
        ("intel/vllm:0.10.0-xpu", "0.10.0"),
        ("public.ecr.aws/deep-learning-containers/vllm:0.11-gpu-py312", "0.11"),
    ],
)
def test_vllm_that_is_too_old_by_its_tag_is_declined(
    image: str, release: str, options: InjectionOptions
) -> None:
    reason = declined(options, pod(container(image=image, args=["--model", "m"])))
    assert reason == f"not injected: vLLM {release} is older than {LEAST}"


@pytest.mark.parametrize(
    "image",
    [
        f"vllm/vllm-openai:v{LEAST}",
        "vllm/vllm-openai:nightly-0a1b2c3d4e5f60718293a4b5c6d7e8f901234567",
        "vllm/vllm-openai:2025.11.3",
        "vllm/vllm-openai@sha256:" + "0" * 64,
        "kserve/huggingfaceserver:v0.15.0",
        "registry.example.com/lmcache-vllm-cpu-tiny:0.1.0",
    ],
)
def test_a_tag_that_names_no_older_vllm_is_injected(image: str, options: InjectionOptions) -> None:
    """The last two have releases of their own."""
    injected(options, pod(container(image=image, command=["vllm", "serve", "m"])))


def test_vllms_own_offloading_needs_a_later_vllm(options: InjectionOptions) -> None:
    annotations = {"lmcache.io/connector": "offloading-tier"}
    old, new = (
        pod(
            container(image=f"vllm/vllm-openai:v{release}", args=["--model", "m"]),
            annotations=annotations,
        )
        for release in (LEAST, LEAST_WITH_TIERS)
    )
    assert declined(options, old).endswith(f"is older than {LEAST_WITH_TIERS}")
    injected(options, new)


def test_a_container_that_names_the_connector_gets_its_module(options: InjectionOptions) -> None:
    """Else vLLM would not start, of whatever release it is."""
    command = ["sh", "-c", f"vllm serve m {CONNECTOR_IN_A_SCRIPT}"]
    injected(options, pod(container(image="vllm/vllm-openai:v0.11.0", command=command)))


@pytest.mark.parametrize(
    ("label", "annotation", "asks"),
    [(None, "true", True), ("true", "false", False), (None, None, False), ("yes", None, False)],
)
def test_label_or_annotation_asks_for_injection(
    label: str | None, annotation: str | None, asks: bool, options: InjectionOptions
) -> None:
    document = plain()
    document["metadata"]["labels"] = {"lmcache.io/inject": label} if label else {}
    document["metadata"]["annotations"] = {"lmcache.io/inject": annotation} if annotation else {}
    outcome = review_pod(options, document, "team-a")
    assert (outcome.verdict == "injected") == asks
    assert asks or outcome.operations == []
