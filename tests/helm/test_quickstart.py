"""docs/quickstart.md: its values are installed as they stand, and what its commands name is then
there.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.helm.conftest import HELM_FOLDER, REPOSITORY, Rendering, both_helms, parsed

if TYPE_CHECKING:
    from tests.helm.conftest import Chart

PAGE = (REPOSITORY / "docs" / "quickstart.md").read_text(encoding="utf-8")
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
OWN, BESIDE = PAGE.split("## 2b. ")
VALUES = re.search(r"<<'YAML'\n(.*?)^YAML$", OWN, re.MULTILINE | re.DOTALL)
INSTALL = re.compile(r"^helm install (\S+) helm/lmcache -n (\S+) (.*)$", re.MULTILINE)
NAMED = re.compile(r"(statefulset|deployment|service|secret)[ /](cache-lmcache-\S+)")
COMMAND = re.compile(
    r"^helm (install|test|uninstall|dependency build) (.*?)(?:\s{2,}#.*)?$", re.MULTILINE
)
KUBECTL = re.compile(
    r"kubectl (?:-n \S+ )?(create secret generic|create namespace|rollout status|[a-z-]+) (.*?)"
    r"(?: -- .*| \| .*|\); do|\s{2,}#.*)?$",
    re.MULTILINE,
)
KINDS = {
    "statefulset": "StatefulSet",
    "deployment": "Deployment",
    "service": "Service",
    "secret": "Secret",
}


def installed(chart: Chart, text: str, file: Path, helm: str) -> Rendering:
    """What the page's `helm install` gives."""
    found = INSTALL.search(text)
    assert found is not None
    release, namespace, options = found.groups()
    words = [word if word != "values.yaml" else str(file) for word in options.split()]
    answer = chart.run(
        "template", release, str(chart.path), "--namespace", namespace, *words, helm=helm
    )
    assert answer.returncode == 0, answer.stderr
    return Rendering(answer.stdout, parsed(answer.stdout))


@both_helms
def test_what_the_commands_name_is_there(chart: Chart, tmp_path: Path, helm: str) -> None:
    assert VALUES is not None
    file = tmp_path / "values.yaml"
    file.write_text(VALUES[1], encoding="utf-8")
    own, beside = installed(chart, OWN, file, helm), installed(chart, BESIDE, file, helm)
    objects = {
        (one["kind"], one["metadata"]["name"]) for one in [*own.manifests, *beside.manifests]
    }
    named = {(KINDS[kind], name) for kind, name in NAMED.findall(PAGE)}
    assert len(named) == 4
    assert named <= objects
    pods = [
        one["spec"]["template"]
        for one in own.of_kind("Deployment")
        if "vllm" in one["metadata"]["name"]
    ]
    assert [pod["metadata"]["labels"]["lmcache.io/model"] for pod in pods] == ["llama"]
    assert "-l lmcache.io/model=llama " in PAGE
    (vllm,) = [one for one in pods[0]["spec"]["containers"] if one["name"] == "vllm"]
    assert "-c vllm " in PAGE
    assert "--enable-prompt-tokens-details" in vllm["args"], "else no answer has cached_tokens"
    assert f"127.0.0.1:{vllm['args'][vllm['args'].index('--port') + 1]}/v1/completions" in PAGE


def test_secrets_that_the_values_name_are_made_first(chart: Chart, tmp_path: Path) -> None:
    assert VALUES is not None
    file = tmp_path / "values.yaml"
    file.write_text(VALUES[1], encoding="utf-8")
    rendering = installed(chart, OWN, file, "helm4")
    needed = {
        variable["valueFrom"]["secretKeyRef"]["name"]
        for _, container in rendering.containers()
        for variable in container.get("env", [])
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    made = {one["metadata"]["name"] for one in rendering.of_kind("Secret")} | set(
        re.findall(r"create secret generic (\S+)", PAGE)
    )
    assert "huggingface" in needed
    assert needed <= made


def test_the_webhook_takes_the_pods_of_the_namespace_that_it_is_installed_in(
    chart: Chart, tmp_path: Path
) -> None:
    beside = installed(chart, BESIDE, tmp_path / "none", "helm4")
    settings = beside.get("ConfigMap", "webhook")["data"]["config.yaml"]
    namespace = INSTALL.search(BESIDE)[2]  # type: ignore[index]
    assert f"namespaces: [{namespace}]" in settings
    assert f"kubectl -n {namespace} patch" in BESIDE
    assert "(8 GiB; " in BESIDE
    assert "arena_gb: 8\n" in settings


@both_helms
def test_helm_has_every_flag_of_the_commands_to_paste(chart: Chart, helm: str) -> None:
    calls = COMMAND.findall(PAGE + README)
    assert {name for name, _ in calls} == {"install", "test", "dependency build"}
    for name, arguments in calls:
        usage = chart.run(*name.split(), "--help", helm=helm).stdout
        for flag in re.findall(r"(?<=\s)--?[a-z][\w-]*", f" {arguments}"):
            assert re.search(rf"(?:^|\s){flag}[ ,=]", usage, re.MULTILINE), f"helm {name} {flag}"


def test_kubectl_has_every_flag_of_the_commands_to_paste(helms: dict[str, Path]) -> None:
    def told(*words: str) -> str:
        program = [str(helms["kubectl"]), *words]
        return subprocess.run(program, capture_output=True, text=True, check=True).stdout

    calls = KUBECTL.findall(PAGE + README)
    assert len(calls) > 10
    general = told("options")
    for verb, arguments in calls:
        usage = told(*verb.split(), "--help") + general
        for flag in re.findall(r"(?<=\s)--?[a-z][\w-]*", f" {arguments}"):
            assert re.search(rf"(?:^|\s){flag}[ ,=]", usage, re.MULTILINE), f"{verb} {flag}"


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md", "helm/lmcache/README.md"])
def test_the_chart_s_dependency_is_built_before_it_is_installed(name: str) -> None:
    """A clone has no `charts` folder, without which Helm ends."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    assert text.index("\nhelm dependency build helm/lmcache\n") < text.index("\nhelm install ")


@pytest.mark.parametrize("text", [README, BESIDE], ids=["README", "quickstart"])
def test_the_webhook_serves_before_a_pod_asks_for_it(text: str) -> None:
    """Otherwise the pod starts without the cache, silently. Helm waits for it (startupCheck)."""
    text = re.sub(r"\\\n\s*", "", text)  # a command over several lines
    [command] = re.findall(r"^helm install .*webhook.enabled=true$", text, re.MULTILINE)
    assert not re.search("startupCheck|--no-hooks|--set.*timeout", command)
    assert text.index(command) < text.index("\nkubectl -n my-models patch ")
    values = yaml.safe_load((HELM_FOLDER / "lmcache" / "values.yaml").read_text(encoding="utf-8"))
    assert values["webhook"]["startupCheck"]["enabled"]
