"""Every command of docs/ctl.md is run as it is written there, against real services."""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from lmcache_core.keys import CacheEngineKey

from tests.fixtures.ctl import Ctl, SmallCluster, small_cluster
from tests.fixtures.kubernetes_pods import pod, pods_api
from tests.fixtures.kv import CHUNK_SIZE, random_kv, tokens_of
from tests.fixtures.sample_service import ADMIN_TOKEN
from tests.fixtures.sidecar import engine_at
from tests.fixtures.waiting import wait_until

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "ctl.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUM_CHUNKS = 2
TIMEOUT_S = 60


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SmallCluster]:
    """Of its own: the document drains it."""
    with small_cluster(tmp_path) as running:
        yield running


def documented(kind: str) -> list[str]:
    return [
        body for found, body in BLOCK.findall(DOCUMENT.read_text(encoding="utf-8")) if found == kind
    ]


def commands() -> list[list[str]]:
    lines = [line for block in documented("sh") for line in block.splitlines()]
    return [
        shlex.split(line, comments=True)[1:] for line in lines if line.startswith("lmcachectl ")
    ]


def get(cluster: SmallCluster, name: str, path: str) -> Any:
    headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
    return (
        httpx.get(cluster.services[name].url + path, headers=headers, trust_env=False)
        .raise_for_status()
        .json()
    )


def filled(cluster: SmallCluster) -> dict[str, str]:
    """Two chunks are everywhere that a command looks; what the document calls by a variable."""
    tokens = tokens_of(NUM_CHUNKS * CHUNK_SIZE)
    with engine_at(cluster.directory / "s.sock") as engine:
        engine.store(tokens, kvcaches=random_kv(len(tokens)))
    (cluster.directory / "ids.txt").write_text(" ".join(str(token) for token in tokens.tolist()))
    wait_until(
        lambda: (
            get(cluster, "sidecar", "/v1/status")["settled"]
            and get(cluster, "storage-0", "/v1/chunks")["chunks"]
        )
    )
    key = get(cluster, "storage-0", "/v1/chunks")["chunks"][0]["key"]
    name = CacheEngineKey.from_url(key)
    return {
        "LOOKUP_URL": cluster.services["lookup"].url,
        "SIDECAR": "sidecar",
        "STORAGE": "storage-1",
        "PEER": "storage-1",
        "KEY": key,
        "CHUNK_HASH": name.chunk_hash,
        "CHUNK_ID": name.chunk_id().hex(),
    }


def variables_for(cluster: SmallCluster) -> dict[str, str]:
    """The variables that the document names, with these services' addresses."""
    found = {"LMCACHE_CTL_TOKEN_FILE": str(cluster.directory / "token")}
    for kind in ("lookup", "broker", "storage", "sidecar"):
        urls = [one.url for name, one in cluster.services.items() if name.startswith(kind)]
        found[f"LMCACHE_CTL_{kind.upper()}_URLS"] = ",".join(urls)
    return found


def write_settings(directory: Path) -> None:
    """The files that the document names."""
    (directory / "sidecar.yaml").write_text(
        yaml.safe_dump({"arena_path": str(directory / "other"), "arena_gb": 0.01})
    )
    (directory / "lookup.yaml").write_text("max_instances: 100\n")


def test_every_command_does_what_is_written(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = filled(cluster)
    directory = cluster.directory
    write_settings(directory)
    monkeypatch.chdir(directory)
    with pods_api() as api:
        for name, component, port in (
            ("demo-lmcache-lookup-7d9f8b6c5-x2x4z", "lookup", 8081),
            ("demo-lmcache-vllm-m-5f6d7-qwert", "vllm", 8083),
        ):
            api.pods.append(
                pod(name, component, None if component == "vllm" else port, ("sidecar",))
            )
            api.ports[name, port] = cluster.services[
                "sidecar" if component == "vllm" else component
            ].ports["port"]
        (directory / ".kube").mkdir()
        api.kubeconfig(directory / ".kube" / "config")
        environ = {"HOME": str(directory), "LMCACHE_CTL_TOKEN_FILE": str(directory / "token")}
        run = commands()
        assert len(run) > 20
        for words in run:
            arguments = [string.Template(word).substitute(values) for word in words]
            names_cluster = "-n" in arguments or "--namespace" in arguments
            more = {} if names_cluster else variables_for(cluster)
            done = Ctl([], environ | more).run(*arguments)
            assert done.stdout, arguments


def test_the_role_is_what_is_asked_for() -> None:
    [role] = [yaml.safe_load(body) for body in documented("yaml") if "kind: Role" in body]
    allowed = {
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {
        ("pods", "list"),
        ("pods/portforward", "get"),
        ("pods/portforward", "create"),
    } <= allowed
    assert all(verb in ("list", "get", "create") for _, verb in allowed)
