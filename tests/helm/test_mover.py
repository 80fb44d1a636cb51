"""The mover in a model's pod: what it has, what it has not, and who reaches it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helm.conftest import MODELS
from tests.helm.test_network import policies
from tests.helm.test_pods import bytes_of, named

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

ON = MODELS | {"sidecar.mover.enabled": True, "sidecar.arenaSize": "64Gi"}
RANGE = {"port": 65440, "endPort": 65535, "protocol": "TCP"}


@pytest.fixture
def rendering(chart: Chart) -> Rendering:
    return chart.render(ON)


def containers(rendering: Rendering) -> tuple[Manifest, Manifest]:
    """The mover and the sidecar."""
    containers = rendering.pod("vllm-tiny")["initContainers"]
    return named(containers, "mover"), named(containers, "sidecar")


def places(container: Manifest) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}


def environ(container: Manifest) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"]}


def test_by_default_there_is_none(chart: Chart) -> None:
    rendering = chart.render(MODELS)
    assert "mover" not in rendering.text
    assert RANGE not in policies(rendering)["vllm"]["egress"][1]["ports"]


def test_one_value_turns_it_on(rendering: Rendering) -> None:
    mover, sidecar = containers(rendering)
    config = rendering.config("vllm-tiny")
    assert config["peer_transport"] == "nixl"
    assert mover["args"] == ["--socket", config["mover_socket"]]
    folder = config["mover_socket"].rpartition("/")[0]
    assert places(mover)[folder] == places(sidecar)[folder]
    assert mover["restartPolicy"] == "Always"


def test_it_holds_nothing_but_the_arena(rendering: Rendering) -> None:
    mover, sidecar = containers(rendering)
    pod = rendering.pod("vllm-tiny")
    assert set(places(mover).values()) == {"arena", "mover-socket", "mover-tmp"}
    assert "mover-socket" not in places(pod["containers"][0]).values(), "vLLM does not talk to it"
    assert places(mover)["/run/lmcache/arena"] == places(sidecar)["/run/lmcache/arena"]
    assert "envFrom" not in mover
    assert not any("valueFrom" in one for one in mover["env"])


def test_its_memory_covers_page_tables_of_the_arena(rendering: Rendering) -> None:
    limit = bytes_of(containers(rendering)[0]["resources"]["limits"]["memory"])
    assert limit == (384 << 20) + (64 << 30) // 256


def test_only_sidecars_pods_reach_its_ports(rendering: Rendering) -> None:
    first, last = environ(containers(rendering)[0])["UCX_TCP_PORT_RANGE"].split("-")
    assert (int(first), int(last)) == (RANGE["port"], RANGE["endPort"])
    for policy in rendering.of_kind("NetworkPolicy"):
        spec = policy["spec"]
        for rule in [*(spec.get("ingress") or []), *(spec.get("egress") or [])]:
            if RANGE in rule.get("ports", []):
                (peer,) = rule.get("from") or rule["to"]
                assert peer == {"podSelector": spec["podSelector"]}, policy["metadata"]["name"]
    vllm = policies(rendering)["vllm"]
    assert sum(RANGE in rule["ports"] for rule in vllm["ingress"]) == 1
    assert sum(RANGE in rule.get("ports", []) for rule in vllm["egress"]) == 1


def test_rdma(chart: Chart) -> None:
    values = {
        "sidecar.mover.transports": "rc,ud,tcp",
        "sidecar.mover.devices": "mlx5_0:1",
        "sidecar.mover.rdmaResource": "rdma/hca",
    }
    mover, sidecar = containers(chart.render(ON | values))
    assert environ(mover)["UCX_TLS"] == "rc,ud,tcp"
    assert environ(mover)["UCX_NET_DEVICES"] == "mlx5_0:1"
    for kind in ("requests", "limits"):
        assert mover["resources"][kind]["rdma/hca"] == 1
        assert "rdma/hca" not in sidecar["resources"][kind]
    assert mover["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert sidecar["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_one_model_alone(chart: Chart) -> None:
    tiny = MODELS["models"]["tiny"]
    models = {"tiny": tiny | {"sidecar": {"mover": {"enabled": True}}}, "other": tiny}
    rendering = chart.render(MODELS | {"models": models})
    with_mover, without = (rendering.pod(f"vllm-{name}") for name in models)
    assert "mover" in [one["name"] for one in with_mover["initContainers"]]
    assert "mover" not in [one["name"] for one in without["initContainers"]]
