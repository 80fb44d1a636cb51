"""Services that are found through the Kubernetes API, and reached by port-forward."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.fixtures.ctl import Ctl, FakeVllm, SmallCluster
from tests.fixtures.kubernetes_pods import PodsApi, pod, pods_api
from tests.fixtures.service_process import running_service
from tests.fixtures.tls import Authority
from tests.fixtures.waiting import wait_until

PODS = {
    "demo-lmcache-lookup-7d9f8b6c5-x2x4z": ("lookup", "lookup", 8081),
    "demo-lmcache-broker-7d9f8b6c5-abcde": ("broker", "broker", 8082),
    "demo-lmcache-storage-0": ("storage-0", "storage", 9090),
    "demo-lmcache-storage-1": ("storage-1", "storage", 8080),
    "demo-lmcache-vllm-m-5f6-qwert": ("sidecar", "vllm", 8083),
}


@pytest.fixture
def api(cluster: SmallCluster) -> Iterator[PodsApi]:
    """A namespace whose pods are the services of the cluster, and one of another kind."""
    with pods_api() as running:
        for name, (service, component, port) in PODS.items():
            containers = ("vllm", "sidecar") if component == "vllm" else ("main",)
            running.pods.append(
                pod(name, component, None if component == "vllm" else port, containers)
            )
            running.ports[name, port] = cluster.services[service].ports["port"]
        running.pods.append(pod("demo-lmcache-redis-0", "redis", 6379))
        yield running


def ctl(
    api: PodsApi, cluster: SmallCluster, directory: Path, *more: str, token: str | None = None
) -> Ctl:
    kubeconfig = api.kubeconfig(directory / "kubeconfig", token)
    return Ctl(
        [f"--kubeconfig={kubeconfig}", f"--token-file={cluster.directory / 'token'}", *more],
        {"HOME": str(directory)},
    )


def test_every_pod_is_asked_through_the_api(
    api: PodsApi, cluster: SmallCluster, tmp_path: Path
) -> None:
    found = ctl(api, cluster, tmp_path).json("status")["services"]
    assert [(one["kind"], one["state"]) for one in found] == [
        ("lookup", "ok"), ("broker", "ok"), ("storage", "ok"), ("storage", "ok"), ("sidecar", "ok"),
    ]  # fmt: skip
    assert found[0]["name"] == "demo-lmcache-lookup-7d9f8b6c5-x2x4z"
    assert found[0]["url"] == "http://demo-lmcache-lookup-7d9f8b6c5-x2x4z.ns:8081"
    assert found[2]["url"] == "http://demo-lmcache-storage-0.ns:9090", (
        "the port that the pod declares"
    )
    assert set(api.forwards) == set(PODS)
    assert [path.name for path in tmp_path.iterdir()] == ["kubeconfig"]


def test_the_token_of_the_release_is_read_from_its_secret(
    api: PodsApi, cluster: SmallCluster, tmp_path: Path
) -> None:
    """As the chart mounts it: each service has `tokens.yaml` of the Secret that holds the
    operator's token too.
    """
    token = (cluster.directory / "token").read_text().strip()
    own = {"name": "demo-lmcache-auth", "items": [{"key": "tokens.yaml", "path": "tokens.yaml"}]}
    for one in api.pods:
        one["spec"]["volumes"] = [
            {"name": "credentials", "projected": {"sources": [{"secret": own}]}}
        ]
    bare = Ctl([f"--kubeconfig={api.kubeconfig(tmp_path / 'kubeconfig')}"], {"HOME": str(tmp_path)})
    api.secrets = {
        "demo-lmcache-auth": {"operator-token": token + "\n", "tokens.yaml": "tokens: []"}
    }
    found = bare.json("status")
    assert not any(one["needs_token"] for one in found["services"])
    assert token not in bare.text("status")
    assert "index" in bare.text("lookup", "status")
    secrets: dict[str, Any]
    for secrets, why in (
        (
            {"demo-lmcache-auth": None},
            "the account needs the verb get on secrets/demo-lmcache-auth, see the role in"
            " docs/ctl.md; to check: kubectl auth can-i get secrets/demo-lmcache-auth -n ns",
        ),
        ({}, "was not read: the Kubernetes API of context here answered"),
        ({"demo-lmcache-auth": {"tokens.yaml": "tokens: []"}}, "has no operator-token"),
    ):
        api.secrets = dict(secrets)
        assert {one["state"] for one in bare.json("status")["services"]} == {"ok"}
        table = " ".join(bare.text("status").split())
        assert "5 of 5 services require a token" in table
        assert "the release's Secret demo-lmcache-auth" in table
        assert why in table
    api.secrets = {"demo-lmcache-auth": {"operator-token": "nobody-knows-0123456789"}}
    assert not any(
        one["needs_token"] for one in ctl(api, cluster, tmp_path).json("status")["services"]
    ), "an option stands before it"


def test_only_a_release_and_only_a_kind(
    api: PodsApi, cluster: SmallCluster, tmp_path: Path
) -> None:
    api.pods.append(pod("other-lmcache-lookup-7d9f8b6c5-x2x4z", "lookup", 8081))
    found = ctl(api, cluster, tmp_path, "--release=demo", "-n", "ns").json("lookup", "status")
    assert found["stats"]["index"] == "embedded"
    assert set(api.forwards) == {"demo-lmcache-lookup-7d9f8b6c5-x2x4z"}
    told = ctl(api, cluster, tmp_path, "--release=absent").text("status", code=1)
    assert "no service of release absent was found in namespace ns of context here" in told


def test_without_options_the_cluster_of_kubectl_is_asked(
    api: PodsApi, cluster: SmallCluster, tmp_path: Path
) -> None:
    (tmp_path / ".kube").mkdir()
    api.kubeconfig(tmp_path / ".kube" / "config")
    bare = Ctl([f"--token-file={cluster.directory / 'token'}"], {"HOME": str(tmp_path)})
    assert len(bare.json("status")["services"]) == len(PODS)
    assert set(api.forwards) == set(PODS)
    url = cluster.services["lookup"].url
    api.forwards.clear()
    [named] = bare.json("status", f"--lookup-url={url}")["services"]
    assert (named["url"], api.forwards) == (url, []), "an address stands before it"
    (tmp_path / "settings.yaml").write_text("port: 8081\n")
    bare.text("doctor", "--check-config", f"lookup={tmp_path / 'settings.yaml'}")
    assert api.forwards == [], "a settings file alone is checked without a cluster"
    kubeconfig = (tmp_path / ".kube" / "config").read_text()
    (tmp_path / ".kube" / "config").write_text('current-context: ""\n')
    told = " ".join(bare.text("status", "--timeout=1", code=1).split())
    assert "nothing answers at the default ports" in told, "it names no cluster"
    (tmp_path / ".kube" / "config").write_text(kubeconfig)
    api.pods.clear()
    told = " ".join(bare.text("status", code=1).split())
    nothing = (
        " of a release was found in namespace ns of context here: give another -n (--namespace)"
        " or --context, or --"
    )
    assert f"no service{nothing}lookup-url or --broker-url" in told
    told = " ".join(bare.text("explain", "--request", "x", code=1).split())
    assert f"no sidecar{nothing}sidecar-url; lmcachectl status -A looks everywhere" in told
    told = " ".join(bare.text("status", "-A", code=1).split())
    assert "found in all namespaces of context here: give another --context" in told
    (tmp_path / ".kube" / "config").write_text("{")
    told = " ".join(bare.text("status", code=2).split())
    assert "no usable kubeconfig (it is damaged) in ~/.kube/config" in told


def test_all_namespaces_are_looked_through(
    api: PodsApi, cluster: SmallCluster, tmp_path: Path
) -> None:
    other = pod("demo-lmcache-lookup-7d9f8b6c5-other", "lookup", 8081)
    other["metadata"]["namespace"] = "other"
    api.pods.append(other)
    at = cluster.services["lookup"].ports["port"]
    api.ports["demo-lmcache-lookup-7d9f8b6c5-other", 8081] = at
    api.is_strict = True
    everywhere = ctl(api, cluster, tmp_path)
    found = everywhere.json("status", "-A")["services"]
    assert [(one["namespace"], one["kind"]) for one in found[-2:]] == [
        ("ns", "sidecar"),
        ("other", "lookup"),
    ]
    table = everywhere.text("status", "-A")
    assert "namespace" in table
    assert re.search(r"^ other +lookup +lookup-7d9f8b6c5-other ", table, re.MULTILINE)
    assert "Names without demo-lmcache-" in table
    assert "leave out --namespace" in everywhere.text("status", "-A", "-n", "ns", code=2)


def test_each_namespace_is_looked_at_by_itself(
    api: PodsApi, cluster: SmallCluster, tmp_path: Path
) -> None:
    auth = pod("x", "broker", 1, auth_secret="auth")["spec"]["volumes"]
    other = pod("two-lmcache-lookup-7d9f8b6c5-other", "lookup", 8081)
    other["metadata"]["namespace"] = "other"
    api.pods.append(other)
    for one in api.pods:
        one["spec"]["volumes"] = auth
    api.secrets = {"auth": {"operator-token": (cluster.directory / "token").read_text()}}
    at = cluster.services["lookup"].ports["port"]
    api.ports["two-lmcache-lookup-7d9f8b6c5-other", 8081] = at
    api.is_strict = True
    everywhere = Ctl([f"--kubeconfig={api.kubeconfig(tmp_path / 'kubeconfig')}", "-A"])
    versions = everywhere.text("version")
    assert re.search(r"^ other +lookup +two-lmcache-lookup-7d9f8b6c5-other ", versions, re.M)
    found = everywhere.json("doctor")["findings"]
    assert {one["where"].partition(", ")[0] for one in found} == {"namespace ns", "namespace other"}
    assert len([one for one in found if one["check"] == "versions"]) == 2
    assert everywhere.text("version", "-o", "name").splitlines()[-1] == (
        "lookup/two-lmcache-lookup-7d9f8b6c5-other"
    )


def test_pods_that_cannot_be_asked_are_reported(
    api: PodsApi, cluster: SmallCluster, tmp_path: Path
) -> None:
    api.pods = [
        pod("demo-lmcache-lookup-7d9f8b6c5-x2x4z", "lookup", 8081),
        pod("demo-lmcache-storage-0", "storage", 8080),
    ]
    api.pods.append(pod("demo-lmcache-storage-1", "storage", 8080, phase="Pending"))
    api.pods.append(pod("demo-lmcache-storage-2", "storage", 8080, phase="Succeeded"))
    found = json.loads(ctl(api, cluster, tmp_path).run("status", "-o", "json", code=1).stdout)[
        "services"
    ]
    problems = {one["name"]: one["problem"] for one in found}
    assert list(problems) == [
        "demo-lmcache-lookup-7d9f8b6c5-x2x4z",
        "demo-lmcache-storage-0",
        "demo-lmcache-storage-1",
    ]
    assert (
        "nothing listens at port 8080 of pod demo-lmcache-storage-0"
        in problems["demo-lmcache-storage-0"]
    )
    assert (
        "connection refused): is it another release that you mean? give another -n"
        in problems["demo-lmcache-storage-0"]
    )
    assert problems["demo-lmcache-storage-1"].startswith(
        "its pod is Pending: kubectl describe pod demo-lmcache-storage-1 -n ns"
    )


def test_broken_streams_are_reported_and_leave_nothing_open(
    api: PodsApi, cluster: SmallCluster, tmp_path: Path
) -> None:
    api.resets = True
    found = ctl(api, cluster, tmp_path).json("status", code=1)["services"]
    assert {one["state"] for one in found} == {"no answer"}
    assert all("was closed before an answer: try again" in one["problem"] for one in found)
    api.resets = False
    assert ctl(api, cluster, tmp_path).json("status")["totals"]["num_well"] == len(PODS)
    wait_until(lambda: not [one for one in threading.enumerate() if "forward" in one.name])


def test_an_api_that_refuses_hangs_or_is_away_is_one_sentence(
    api: PodsApi, cluster: SmallCluster, tmp_path: Path
) -> None:
    told = ctl(api, cluster, tmp_path, token="of-someone-else").text("status", code=1)
    assert (
        "the Kubernetes API of context here refuses pods in namespace ns (Unauthorized): log in"
        " again, or give another --context" in told
    )
    assert "of-someone-else" not in told
    api.hangs = True
    told = ctl(api, cluster, tmp_path, "--timeout=1").text("lookup", "status", code=1)
    assert told.count("no answer within 1 s") == 1
    assert (
        "it is in namespace ns of context here: give another -n (--namespace) or --context" in told
    )
    api.pods += [pod(f"demo-lmcache-storage-{number}", "storage", 8080) for number in range(2, 8)]
    found = ctl(api, cluster, tmp_path, "--timeout=1").json("status", code=1)
    assert {one["state"] for one in found["services"]} == {"no answer"}
    kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
    kubeconfig.write_text(kubeconfig.read_text().replace(api.url, "http://127.0.0.1:9"))
    told = Ctl([f"--kubeconfig={kubeconfig}", "--timeout=5"], {"HOME": str(tmp_path)}).text(
        "status", code=1
    )
    assert (
        f"the Kubernetes API of context here in kubeconfig={kubeconfig} at http://127.0.0.1:9"
        " cannot be reached" in told
    )
    assert "asked for pods in namespace ns: give another --context or --kubeconfig" in told
    assert "context 'there' is not in the kubeconfig: it has here" in Ctl(
        [f"--kubeconfig={kubeconfig}"]
    ).text("status", "--context", "there", code=2)


def test_pods_that_encrypt(tmp_path: Path) -> None:
    """As the chart's certificates do, these name localhost, which a forwarded connection ends
    at.
    """
    authority = Authority(tmp_path)
    pair = authority.sign("pod", "localhost", "demo-lmcache-lookup.ns.svc")
    environ = {
        "LMCACHE_LOOKUP_PORT": "0",
        "LMCACHE_LOOKUP_TLS_CERT_FILE": str(pair.cert),
        "LMCACHE_LOOKUP_TLS_KEY_FILE": str(pair.key),
    }
    with running_service("lmcache_lookup", tmp_path, environ) as service, pods_api() as api:
        api.pods.append(pod("demo-lmcache-lookup-7d9f8b6c5-x2x4z", "lookup", 8081))
        api.ports["demo-lmcache-lookup-7d9f8b6c5-x2x4z", 8081] = service.ports["port"]
        secure = Ctl(
            [f"--kubeconfig={api.kubeconfig(tmp_path / 'kubeconfig')}", f"--tls={authority.file}"],
            {"HOME": str(tmp_path)},
        )
        assert (
            secure.json("status")["services"][0]["url"]
            == "https://demo-lmcache-lookup-7d9f8b6c5-x2x4z.ns:8081"
        )
        assert {one["check"] for one in secure.json("doctor")["findings"]} >= {
            "certificate",
            "kubernetes",
        }
        assert "certificate is not trusted" in secure.text(
            "status", "--tls-name", "elsewhere", code=1
        )
        plain = Ctl(secure.options[:1], secure.environ)
        assert "perhaps it wants https (--tls)" in " ".join(plain.text("status", code=1).split())


def test_the_page_is_forwarded_until_ctrl_c(
    api: PodsApi, cluster: SmallCluster, tmp_path: Path
) -> None:
    for one in api.pods:
        one["spec"]["volumes"] = pod("x", "broker", 1, auth_secret="demo-lmcache-auth")["spec"][
            "volumes"
        ]
    kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "lmcache_ctl", "dashboard", "--no-browser"),
            f"--kubeconfig={kubeconfig}",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url), process.communicate()
        assert "<html" in httpx.get(url, trust_env=False, timeout=60).text
    finally:
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert "kubectl -n ns get secret demo-lmcache-auth" in told
    assert "Forwarding to pod demo-lmcache-broker-7d9f8b6c5-abcde until Ctrl-C." in told
    assert "Traceback" not in told


def test_a_broker_without_a_cluster_needs_no_forwarding(cluster: SmallCluster) -> None:
    url = cluster.services["broker"].url
    assert Ctl([f"--url={url}"]).text("dashboard", "--no-browser") == f"{url}/\n"


def test_a_prompt_is_tokenized_by_the_vllm_of_the_sidecars_pod(
    api: PodsApi, cluster: SmallCluster, tmp_path: Path, vllm: FakeVllm
) -> None:
    api.ports["demo-lmcache-vllm-m-5f6-qwert", 8000] = urlsplit(vllm[0]).port or 0
    (tmp_path / "prompt").write_text("1 2 3")
    told = ctl(api, cluster, tmp_path).text("explain", "--prompt", tmp_path / "prompt", code=1)
    assert "an engine must have connected to this sidecar once" in told
    assert [question["prompt"] for question in vllm[1]] == ["1 2 3"]
