"""Values that are refused: what no value may be, and what contradicts itself, each with a
sentence of its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from lmcache_core.storage.disk.backend import CLOSE_WAIT_S

from tests.helm.conftest import MODEL, both_helms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.helm.conftest import Chart, Manifest

TABLE = yaml.safe_load((Path(__file__).parent / "refusals.yaml").read_text(encoding="utf-8"))
REFUSED: list[tuple[str, Manifest]] = [
    (told, values)
    for told, cases in TABLE.items()
    if not told.startswith(".")
    for values in (cases if isinstance(cases, list) else [cases])
]
TOLD_ELSEWHERE = ("the release is named", "storage.persistence is to be")
"""Sentences that need another release, or a cluster: test_names.py and test_upgrades.py."""
MP = ("--distributed-executor-backend", "mp")
SERVER = "vllm.entrypoints.openai.api_server"
SIZE = re.compile(r"[0-9.]+([KMGTP]i|[kMGTP])")
FAIL = re.compile(r'\{\{-? fail (?:\(printf )?"((?:[^"\\]|\\.)*)"')


@pytest.mark.parametrize(
    ("told", "values"), REFUSED, ids=[f"{told}-{n}" for n, (told, _) in enumerate(REFUSED)]
)
def test_refused(chart: Chart, told: str, values: Manifest) -> None:
    assert told in chart.refuse(values)


def test_every_refusal_of_the_chart_is_tested(chart: Chart) -> None:
    templates = "".join(
        path.read_text(encoding="utf-8")
        for path in (chart.path / "templates").iterdir()
        if path.is_file()
    )
    sentences = [one for one in FAIL.findall(templates) if not one.startswith(TOLD_ELSEWHERE)]
    assert len(sentences) + len(TOLD_ELSEWHERE) == len(re.findall(r"\{\{-? fail ", templates))
    refusals = [chart.refuse(values) for _, values in REFUSED]
    for one in sentences:
        pattern = re.compile(re.sub("%[a-z]", ".*", re.escape(one)))
        assert any(pattern.search(refusal) for refusal in refusals), f"not tested: {one}"


@pytest.mark.parametrize(
    "model",
    [
        {"connector": {"enabled": False}, "extraArgs": ["--kv-transfer-config", "{}"]},
        {"extraArgs": ["--pipeline-parallel-size", "2", *MP, "--kv-cache-dtype", "fp8"]},
        {"command": ["nice", "-n", "5", "vllm", "serve"]},
        {"command": ["torchrun", "--nnodes", "2", "--headless", "x", "-m", SERVER]},
        {"command": ["vllm", "serve", "--nnodes=1"], "extraArgs": ["-n", "1", "--node-rank", "0"]},
        {"extraArgs": ["--nnodes", "1", "--node_rank=0", "--master-addr", "127.0.0.1"]},
        {"extraArgs": ["--chat-template", "say -n something"]},
        {"extraArgs": ["--chat-template", "{{ '--nnodes 2' }} --headless "]},
    ],
    ids=str,
)
def test_a_connector_of_ones_own_several_gpus_and_one_node_are_taken(
    chart: Chart, model: Manifest
) -> None:
    vllm = chart.render({"models": {"tiny": MODEL | model}}).container("vllm")
    assert vllm["command"] == model.get("command", vllm["command"])
    extra = model.get("extraArgs", [])
    assert vllm["args"][len(vllm["args"]) - len(extra) :] == extra


@both_helms
def test_without_a_registry_one_sentence_names_it(chart: Chart, helm: str) -> None:
    """Nodes would look for the images at Docker Hub, where they are not."""
    none = {"images.registry": ""}
    answer = chart.template(none, (), helm)
    assert answer.returncode != 0
    told = "images.registry is empty, and the images of this project are in no public registry:"
    assert f"{told} build and push them" in answer.stderr
    own = {f"{name}.image.registry": "mine" for name in ("storage", "lookup", "broker")}
    assert chart.template(own | none, (), helm).returncode == 0, "each may have its own"


@both_helms
@pytest.mark.parametrize(
    ("size", "memory_gb", "memory_mi"),
    [("0.5Gi", 0.5, 512), ("1536Mi", 1.5, 1536), ("4G", 4e9 / 2**30, 3815)],
)
def test_sizes_have_units(
    chart: Chart, size: str, memory_gb: float, memory_mi: int, helm: str
) -> None:
    sizes = {"storage.memorySize": size, "storage.memoryOverhead": "512Mi"}
    rendering = chart.render(sizes, helm=helm)
    assert rendering.config("storage")["memory_gb"] == pytest.approx(memory_gb)
    limits = rendering.container("storage")["resources"]["limits"]
    assert limits["memory"] == f"{memory_mi + 512}Mi"


def test_the_wait_for_a_disk_that_hangs_is_the_disk_tiers_own(chart: Chart) -> None:
    times = {"storage.preStopSeconds": 1, "storage.config": {"drain_timeout_s": 2}}
    least = 1 + 2 * 2 + 2 * 20 + int(CLOSE_WAIT_S)
    chart.render(times | {"storage.terminationGracePeriodSeconds": least})
    told = f"a pod may take {least} s to end"
    assert told in chart.refuse(times | {"storage.terminationGracePeriodSeconds": least - 1})


def sizes_of(values: Manifest, *path: str) -> Iterator[str]:
    """Yield what has a size by default, or is a size by name."""
    for name, value in values.items():
        if isinstance(value, dict):
            # Requests and limits are Kubernetes' own quantities.
            yield from () if name == "resources" else sizes_of(value, *path, name)
        elif isinstance(value, str) and (SIZE.fullmatch(value) or name.endswith("Size")):
            yield ".".join((*path, name))


def test_every_size_is_checked(chart: Chart) -> None:
    """Else what no cluster can have would only be refused by its API server, or by the service."""
    values = yaml.safe_load((chart.path / "values.yaml").read_text(encoding="utf-8"))
    names = list(sizes_of(values))
    assert len(names) > 10
    others = {"models.tiny": MODEL, "webhook.enabled": True}
    for size in ("8GB", "8m", "lots"):
        message = chart.refuse(others | dict.fromkeys(names, size))
        for name in names:
            assert f"at '/{name.replace('.', '/')}': value must be 'a size with its unit" in message
    for name in names:
        message = chart.refuse(others | {name: "9999Pi"})
        assert f"{name.removeprefix('modelDefaults.')}=9999Pi: must be at most" in message


def test_certificates_are_asked_for_of_what_is_installed_only(chart: Chart) -> None:
    alone = {"lookup.enabled": False, "broker.enabled": False, "redis.enabled": False}
    given = {"tls.enabled": True, "tls.existingSecrets": {"storage": "a", "sidecar": "c"}}
    chart.render(alone | given)
