"""Generated secrets: the services can read them, an upgrade keeps them, and Redis starts with
them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
import yaml
from lmcache_core.security import TokenTable, read_ticket_keys

from tests.fixtures.http_server import Handler, served
from tests.fixtures.waiting import wait_until
from tests.helm.conftest import SET_REGISTRY, both_helms

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

BINARIES = Path(sys.executable).parent
START_TIMEOUT_S = 20
OWNER = {"meta.helm.sh/release-name": "cache", "meta.helm.sh/release-namespace": "inference"}
"""Annotations of what Helm has installed."""


def decoded(secret: Manifest) -> dict[str, str]:
    return {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}


def check_files(folder: Path, tenant: str) -> None:
    """The services' own readers take these files, and each token is who it should be."""
    table = TokenTable.from_file(folder / "tokens.yaml")
    for holder, role in (("storage", "storage"), ("sidecar", "client")):
        principal = table.authenticate((folder / f"{holder}-token").read_text(encoding="ascii"))
        assert (principal.name, principal.tenant, principal.role) == (holder, tenant, role)
    keys = read_ticket_keys(folder / "ticket-keys")
    assert len(keys) == 1
    assert all(len(key) >= 32 for key in keys.values())
    assert len((folder / "salt").read_bytes()) >= 32


def test_services_read_the_generated_secrets(chart: Chart, tmp_path: Path) -> None:
    rendering = chart.render({"auth.tenant": "team-a"})
    for name in ("auth", "keys"):
        for key, text in decoded(rendering.get("Secret", name)).items():
            (tmp_path / key).write_text(text, encoding="ascii")
    check_files(tmp_path, "team-a")
    operator = TokenTable.from_file(tmp_path / "tokens.yaml").authenticate(
        (tmp_path / "operator-token").read_text(encoding="ascii")
    )
    assert operator.role == "admin"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_services_read_secrets_made_as_the_readme_says(chart: Chart, tmp_path: Path) -> None:
    readme = (chart.path / "README.md").read_text(encoding="utf-8")
    block = next(
        block
        for block in re.findall(r"^```\w*\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
        if "token()" in block
    )
    script = "".join(
        line for line in block.splitlines(keepends=True) if not line.startswith("kubectl ")
    )
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, check=True, timeout=30)
    check_files(tmp_path, "default")


RESOURCES = {
    "v1": {
        "secrets": "Secret",
        "services": "Service",
        "configmaps": "ConfigMap",
        "serviceaccounts": "ServiceAccount",
    },
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "rbac.authorization.k8s.io/v1": {
        "roles": "Role",
        "rolebindings": "RoleBinding",
        "clusterroles": "ClusterRole",
        "clusterrolebindings": "ClusterRoleBinding",
    },
    "admissionregistration.k8s.io/v1": {
        "mutatingwebhookconfigurations": "MutatingWebhookConfiguration"
    },
}
OF_THE_CLUSTER = ("clusterroles", "clusterrolebindings", "mutatingwebhookconfigurations")


def discovery() -> dict[str, Manifest]:
    """What a cluster says that it knows, by path."""
    groups = []
    answers: dict[str, Manifest] = {}
    for group_version, kinds in RESOURCES.items():
        verbs = ["get", "list", "create"]
        listed = [
            {"name": name, "namespaced": name not in OF_THE_CLUSTER, "kind": kind, "verbs": verbs}
            for name, kind in kinds.items()
        ]
        answers[f"/apis/{group_version}"] = {
            "kind": "APIResourceList",
            "groupVersion": group_version,
            "resources": listed,
        }
        version = {"groupVersion": group_version, "version": group_version.rpartition("/")[2]}
        groups.append(
            {
                "name": group_version.partition("/")[0],
                "versions": [version],
                "preferredVersion": version,
            }
        )
    answers["/api/v1"] = answers.pop("/apis/v1")
    answers["/api"] = {"kind": "APIVersions", "versions": ["v1"]}
    answers["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups[1:]}
    answers["/version"] = {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
    return answers


class FakeCluster(Handler):
    """As much of the Kubernetes API as Helm needs to look an object up.

    Attributes:
        objects: By resource and name, as `secrets/some-name`.
    """

    objects: ClassVar[dict[str, Manifest]] = {}

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        answer = (
            self.objects.get("/".join(path.split("/")[-2:]))
            if "/namespaces/" in path
            else discovery().get(path)
        )
        missing = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": "NotFound",
            "code": 404,
        }
        self.answer(200 if answer else 404, answer or missing)


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    """A cluster that holds what `FakeCluster.secrets` says."""
    with served(FakeCluster) as url:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": url}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
            "users": [{"name": "fake", "user": {}}],
            "current-context": "fake",
        }
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(config), encoding="ascii")
        yield path
    FakeCluster.objects.clear()


def run_against(
    chart: Chart, kubeconfig: Path, helm: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Render the chart where `FakeCluster` can be asked."""
    command = [
        str(chart.helms[helm]),
        "template",
        "cache",
        str(chart.path),
        "--namespace",
        "inference",
        "--dry-run=server",
    ]
    command += [*SET_REGISTRY, *arguments]
    command.append("--disable-openapi-validation")  # which the stand-in does not serve
    home = kubeconfig.parent
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "KUBECONFIG": str(kubeconfig)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


def render_against(chart: Chart, kubeconfig: Path, helm: str) -> dict[str, Manifest]:
    answer = run_against(chart, kubeconfig, helm)
    assert answer.returncode == 0, answer.stderr
    return {
        one["metadata"]["name"]: one
        for one in yaml.safe_load_all(answer.stdout)
        if one and one["kind"] == "Secret"
    }


def install(secrets: dict[str, Manifest]) -> None:
    """Put Secrets into the cluster with the marks that Helm leaves on what it installs."""
    for name, secret in secrets.items():
        FakeCluster.objects[f"secrets/{name}"] = secret | {
            "metadata": secret["metadata"] | {"annotations": OWNER}
        }


@both_helms
def test_an_upgrade_keeps_the_secrets(chart: Chart, kubeconfig: Path, helm: str) -> None:
    first = render_against(chart, kubeconfig, helm)
    assert set(first) == {"cache-lmcache-auth", "cache-lmcache-keys", "cache-lmcache-redis"}
    assert render_against(chart, kubeconfig, helm) != first, "with nothing to keep, secrets are new"
    install(first)
    assert render_against(chart, kubeconfig, helm) == first


def test_an_upgrade_adds_what_an_older_release_did_not_have(chart: Chart, kubeconfig: Path) -> None:
    first = render_against(chart, kubeconfig, "helm4")
    older = json.loads(json.dumps(first["cache-lmcache-keys"]))
    del older["data"]["salt"]
    install({"cache-lmcache-keys": older})
    second = render_against(chart, kubeconfig, "helm4")["cache-lmcache-keys"]["data"]
    assert second["ticket-keys"] == older["data"]["ticket-keys"]
    assert second["salt"]


def redis_container(rendering: Rendering) -> Manifest:
    return next(container for name, container in rendering.containers() if name.endswith("/redis"))


def test_redis_starts_with_its_password_and_stops_on_sigterm(chart: Chart, tmp_path: Path) -> None:
    """The container's own commands, with its paths moved under a folder and a port of ours."""
    rendering = chart.render()
    container = redis_container(rendering)
    (tmp_path / "data").mkdir()
    config = rendering.get("ConfigMap", "redis")["data"]["redis.conf"]
    port = "port 0\nunixsocket redis.sock"  # no TCP port, so that tests do not meet
    (tmp_path / "redis.conf").write_text(
        config.replace("port 6379", port).replace("dir /data", f"dir {tmp_path / 'data'}")
    )
    (tmp_path / "redis-password").write_text(
        decoded(rendering.get("Secret", "redis"))["redis-password"]
    )

    def moved(text: str) -> str:
        text = text.replace("/etc/redis/", f"{tmp_path}/").replace(
            "/run/secrets/redis/", f"{tmp_path}/"
        )
        return text.replace("redis-cli", f"redis-cli -s {tmp_path}/data/redis.sock")

    env = {"PATH": f"{BINARIES}:{os.environ['PATH']}"}
    ping = [moved(part) for part in container["livenessProbe"]["exec"]["command"]]
    server = subprocess.Popen(
        [moved(part) for part in container["command"]], env=env, stdout=subprocess.DEVNULL
    )
    try:
        wait_until(
            lambda: not subprocess.run(ping, env=env, capture_output=True, check=False).returncode,
            complaint="the liveness probe has not passed",
        )
        assert "redis-server" in Path(f"/proc/{server.pid}/cmdline").read_text(), (
            "the shell stands in the way of signals"
        )
        stranger = [str(BINARIES / "redis-cli"), "-s", f"{tmp_path}/data/redis.sock", "ping"]
        assert (
            "NOAUTH" in subprocess.run(stranger, capture_output=True, text=True, check=False).stdout
        )
        server.terminate()
        assert server.wait(timeout=START_TIMEOUT_S) == 0
    finally:
        server.kill()
        server.wait()
