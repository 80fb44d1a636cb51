"""The shell blocks of README.md and docs/quickstart.md, run as they are written: each page in one
shell that stops at the first failure.

Bash, make, Helm, python3 and lmcachectl are real; lmcachectl reaches real services through a
stand-in for the Kubernetes API. Git, Docker, kind, kubectl and pip are stand-ins, and so are the
Python that `make` installs with, pytest, and the demo, which `tests/integration/demo` runs. Helm
renders what it would install.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.fixtures.ctl import SmallCluster
from tests.fixtures.kubernetes_pods import PodsApi, pod, pods_api
from tests.fixtures.stand_ins import Answer, StandIns
from tests.helm.conftest import fetch_helms
from tests.integration.cluster.test_kind import HEALTHY
from tests.unit.docs.pages import FENCE, ROOT

TIMEOUT_S = 200
INSTALLED = ".venv/bin"
SECRET = "cache-lmcache-auth"
FIRST, SECOND = "pod/cache-lmcache-vllm-llama-5f6-a", "pod/cache-lmcache-vllm-llama-5f6-b"
ANSWERS: list[Answer] = [
    ("-l lmcache.io/model=llama", f"{FIRST}\n{SECOND}", 0),
    (f"exec -i {FIRST}", '{"cached_tokens": 0}', 0),
    (f"exec -i {SECOND}", '{"cached_tokens": 3840}', 0),
]
PROGRAMS = {
    "helm": """#!/bin/bash
case $1 in
  install) shift; exec "$REAL/helm4" template "$@" >> installed.yaml ;;
  test|upgrade) exec "$STAND_INS/helm" "$@" ;;
  *) exec "$REAL/helm4" "$@" ;;
esac
""",
    # The shell is in the clone already
    "git": """#!/bin/bash
case $1 in
  clone) ln -s . lmcache ;;
  *) exit 2 ;;
esac
""",
}


@pytest.fixture
def api(cluster: SmallCluster) -> Iterator[PodsApi]:
    """The release of the quick start, whose pods are the services of the cluster."""
    with pods_api() as running:
        for service, component, port in (
            ("lookup", "lookup", 8081),
            ("broker", "broker", 8082),
            ("storage-0", "storage", 8080),
        ):
            name = f"cache-lmcache-{component}-0"
            running.pods.append(pod(name, component, port, auth_secret=SECRET))
            running.ports[name, port] = cluster.services[service].ports["port"]
        token = (cluster.directory / "token").read_text()
        running.secrets[SECRET] = {"operator-token": token, "tokens.yaml": "tokens: []"}
        yield running


def pasted(name: str, directory: Path, api: PodsApi) -> tuple[str, list[str], Path]:
    """Paste a page; return what it printed, the calls of stand-ins and the clone it ran in."""
    clone, programs, stand_ins = (directory / one for one in ("clone", "programs", "stand-ins"))
    for one in (clone, programs, stand_ins):
        one.mkdir()
    copy = 'git ls-files -co --exclude-standard -z | xargs -0 cp --parents -t "$1"'
    subprocess.run(["bash", "-c", copy, "bash", clone], cwd=ROOT, check=True)
    tools = StandIns(stand_ins, ("docker", "kind", "kubectl", "helm", "pip"), [*ANSWERS, *HEALTHY])
    (clone / INSTALLED).mkdir(parents=True)
    StandIns(clone / INSTALLED, ("python", "lmcache-demo", "pytest"), [])
    for program, text in PROGRAMS.items():
        (programs / program).write_text(text)
        (programs / program).chmod(0o755)
    blocks = FENCE.findall((ROOT / name).read_text(encoding="utf-8"))
    script = "\n".join(text for language, text in blocks if language in ("", "sh"))
    # Of a `make test LONG=1` that runs this test, the page's own `make test` knows nothing
    ours = ("LMCACHE_", "MAKE", "MFLAGS", "LONG")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = [programs, stand_ins, Path(sys.executable).parent, os.environ["PATH"]]
    printed = ""
    with subprocess.Popen(
        ["bash", "-eu", "-c", script],
        cwd=clone,
        env={
            **kept,
            "HOME": str(directory),
            "PATH": os.pathsep.join(map(str, path)),
            "REAL": str(fetch_helms()["helm4"].parent),
            "STAND_INS": str(stand_ins),
            "KUBECONFIG": str(api.kubeconfig(directory / "kubeconfig")),
            "BROWSER": "true",
            "HF_TOKEN": "hf_x",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as shell:
        assert shell.stdout is not None
        for line in shell.stdout:
            printed += line
            if "until Ctrl-C" in line:  # the dashboard, the last command of its page
                os.killpg(shell.pid, signal.SIGINT)
    assert shell.returncode in (0, 128 + signal.SIGINT, -signal.SIGINT), printed
    return printed, tools.calls, clone


def kinds_of(clone: Path) -> set[str]:
    text = (clone / "installed.yaml").read_text()
    return {one["kind"] for one in yaml.safe_load_all(text) if one}


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_the_readme(tmp_path: Path, api: PodsApi) -> None:
    printed, calls, clone = pasted("README.md", tmp_path, api)
    *installs, compiled, demo, tools, tests = (clone / INSTALLED / "calls").read_text().splitlines()
    assert all(" -m pip install " in call for call in (*installs, tools)), installs
    assert (compiled, demo) == ("python -m lmcache_core.serde.warm_up", "lmcache-demo")
    assert tests.startswith("pytest -n auto ")
    assert [line.split() for line in printed.splitlines() if line.startswith("model-b")] == [
        ["model-b", "87", "3840", "of", "4000"]
    ]
    assert "MutatingWebhookConfiguration" in kinds_of(clone)
    assert calls[-1].startswith("kubectl -n my-models patch deployment my-vllm -p {")


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_the_quick_start(tmp_path: Path, api: PodsApi) -> None:
    printed, calls, clone = pasted("docs/quickstart.md", tmp_path, api)
    assert "docker buildx bake --push" in calls
    assert {"StatefulSet", "MutatingWebhookConfiguration"} <= kinds_of(clone)
    assert len(json.loads((clone / "request.json").read_text())["prompt"].split()) > 2000
    assert [line for line in printed.splitlines() if "cached_tokens" in line] == [
        '{"cached_tokens": 0}',
        '{"cached_tokens": 3840}',
    ]
    assert "pip install ./libs/lmcache_core ./libs/lmcache_ctl" in calls
    for name in ("lookup-0", "broker-0", "storage-0"):
        assert name in printed
    assert "require a token" not in printed, "the release's token was read from its Secret"
    assert f"kubectl -n lmcache get secret {SECRET}" in printed
