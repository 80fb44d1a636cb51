"""`make kind-up` and `make kind-down` with stand-ins for docker, kind, helm and kubectl, which are
not here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import hcl2
import pytest
import yaml

from tests.cluster import kind
from tests.cluster.ask import NUM_TOKENS, Answer
from tests.cluster.helm import OLDEST
from tests.cluster.names import VALUES
from tests.fixtures.stand_ins import StandIns

ROOT = Path(__file__).resolve().parents[3]


def answer(num_cached: int) -> str:
    return json.dumps(asdict(Answer("w1", 4000, num_cached, 2431.4 if not num_cached else 87.2)))


def pod(name: str, *, ready: bool = True) -> dict[str, object]:
    return {"metadata": {"name": name}, "status": {"containerStatuses": [{"ready": ready}]}}


PODS = json.dumps({"items": [pod("model-a"), pod("model-b"), pod("model-c", ready=False)]})
HEALTHY = [
    ("helm version", "v3.19.0", 0),
    ("kubectl&get statefulset", "statefulset.apps/cache-lmcache-storage", 0),
    ("kubectl&get pods", PODS, 0),
    ("exec model-a", answer(0), 0),
    ("exec model-b", answer(3840), 0),
]
Kind = Callable[..., tuple[int, str, str, list[str]]]


@pytest.fixture
def kind_command(tmp_path: Path) -> Kind:
    """Runs `python -m tests.cluster.kind` with answers of the tools, and the tools there are."""

    def call(
        command: str,
        *answers: tuple[str, str, int],
        tools: tuple[str, ...] = kind.TOOLS,
        **variables: str,
    ) -> tuple[int, str, str, list[str]]:
        stand_ins = StandIns(tmp_path, tools, [*answers, *HEALTHY])
        script = "from tests.cluster import kind; kind.ANNOUNCED_S = 0; import sys; "
        script += f"sys.exit(kind.main([{command!r}]))"
        ran = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={"PATH": str(tmp_path), "PYTHONPATH": str(ROOT), **variables},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        return ran.returncode, ran.stdout, ran.stderr, stand_ins.calls

    return call


def test_up_builds_loads_installs_and_shows_a_hit(kind_command: Kind) -> None:
    code, output, errors, calls = kind_command("up")
    assert code == 0, errors
    order = [
        "kind create cluster --name lmcache",
        "docker buildx bake --load cluster-test",
        "kind load docker-image --name lmcache localhost/lmcache-storage:kind",
        "kubectl --context kind-lmcache --namespace lmcache create namespace lmcache",
        f"helm upgrade --install cache helm/lmcache --values {VALUES}",
        "kubectl --context kind-lmcache --namespace lmcache scale",
        "kubectl --context kind-lmcache --namespace lmcache rollout status",
        "kubectl --context kind-lmcache --namespace lmcache exec model-a",
        "kubectl --context kind-lmcache --namespace lmcache exec model-b",
    ]
    places = [next(i for i, call in enumerate(calls) if call.startswith(one)) for one in order]
    assert places == sorted(places)
    assert not [call for call in calls if "rollout restart" in call]
    shown = [line.split() for line in output.splitlines() if line.startswith("model-")]
    assert shown == [
        ["model-a", "2431", "0", "of", "4000"],
        ["model-b", "87", "3840", "of", "4000"],
    ]
    assert "port-forward service/cache-lmcache-broker 8082\n  make kind-down\n" in output


@pytest.mark.parametrize(
    ("image", "option"), [("", ""), ("kindest/node:v1.29.14", " --image kindest/node:v1.29.14")]
)
def test_the_kubernetes_may_be_chosen(kind_command: Kind, image: str, option: str) -> None:
    _, _, _, calls = kind_command("up", NODE_IMAGE=image)
    assert f"kind create cluster --name lmcache{option} --wait 180s" in calls


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        (("docker info", "no daemon", 1), "Docker does not answer: start it"),
        (("docker buildx version", "", 1), "Docker has no buildx: install the plugin"),
        (("helm version", "v3.13.3", 0), "Helm 3.14 or later is needed"),
        (("buildx bake", "", 1), "`docker buildx bake --load cluster-test` failed (1)"),
        (("helm upgrade", "no such value", 1), "failed (1): no such value"),
        (("get pods", json.dumps({"items": [pod("a")]}), 0), "only these pods of the model"),
        (("exec model-b", answer(0), 0), "the second pod did not reuse the first one's KV"),
    ],
)
def test_up_says_what_failed(
    kind_command: Kind, answers: tuple[str, str, int], sentence: str
) -> None:
    code, _, errors, _ = kind_command("up", answers)
    assert code == 1
    assert errors.startswith("make kind-up: ")
    assert sentence in errors
    assert "Traceback" not in errors


def test_missing_tools_are_named(kind_command: Kind) -> None:
    code, _, errors, calls = kind_command("up", tools=("docker", "helm"))
    assert (code, calls) == (1, [])
    assert errors == "make kind-up: not on PATH: kind, kubectl: install and run it again\n"


def test_the_images_are_those_that_are_baked_and_asked_for() -> None:
    bake = hcl2.loads((ROOT / "docker-bake.hcl").read_text(encoding="utf-8"))
    (group,) = [body for one in bake["group"] for name, body in one.items() if "cluster" in name]
    assert [name.strip('"') for name in group["targets"]] == list(kind.IMAGES)
    values = yaml.safe_load((ROOT / VALUES).read_text(encoding="utf-8"))
    asked = [values["images"], values["modelDefaults"]["image"]]
    assert [(one["registry"], one["tag"]) for one in asked] == [(kind.REGISTRY, kind.TAG)] * 2


def test_the_page_says_what_it_needs_and_does() -> None:
    page = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    section = page.partition("## Your machine")[2].partition("\n## ")[0]
    needed = section.partition("You need")[2].partition(";")[0].lower()
    assert all(tool in needed for tool in kind.TOOLS)
    assert f"Helm {OLDEST[0]}.{OLDEST[1]} or later" in section
    assert f"kind cluster `{kind.NAME}`" in section
    assert f"{NUM_TOKENS:,} tokens" in section
    shown = [line.split() for line in kind.NEXT.splitlines() if "kubectl" in line]
    for words in shown:
        assert " ".join(word for word in words if word not in ("--context", kind.CONTEXT)) in page
