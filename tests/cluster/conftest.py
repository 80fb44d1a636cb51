"""The release under test, and what is printed when a test fails."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster import manifests
from tests.cluster.ask import Answer
from tests.cluster.helm import Helm, find_helm, image_values
from tests.cluster.kube import ApiError, Cluster
from tests.cluster.login import usable_login
from tests.cluster.names import ask_command
from tests.cluster.oracle import REPORT_PREFIX, Report
from tests.cluster.waiting import DELETE_TIMEOUT_S, ClusterError, progress, wait_until

HELM_TIMEOUT_S = 600
TRAFFIC_START_S = 180
TRAFFIC_END_S = 300
NAMESPACE = os.environ.get("NAMESPACE", "lmcache-test")

CLUSTER = pytest.StashKey[Cluster]()


@dataclass
class Installation:
    """The release of this run.

    Attributes:
        cluster: Its namespace.
        helm: The release.
        images: `registry/path:tag`.
        pull_secret: Name of the Secret with the registry's login; "" if it needs none.
        before: Objects of the namespace and of the cluster before it was installed.
    """

    cluster: Cluster
    helm: Helm
    images: str
    pull_secret: str = ""
    before: set[str] = field(default_factory=set)

    def image(self, name: str) -> str:
        """Return one of the images."""
        registry, _, tag = self.images.rpartition(":")
        return f"{registry}/lmcache-{name}:{tag}"

    def ask(self, pod: str, container: str, seed: int, num_tokens: int) -> Answer:
        """Send a prompt to the vLLM of a pod, from inside."""
        command = ask_command(seed, num_tokens)
        return Answer(**json.loads(self.cluster.execute(pod, container, command)))

    @contextmanager
    def traffic(self) -> Iterator[Traffic]:
        """Run traffic of every kind during the block; its report is available afterwards."""
        pods = self.cluster.path("pods", manifests.TRAFFIC)
        self.cluster.delete(pods)
        wait_until(self._no_traffic, "the traffic's pod gone", DELETE_TIMEOUT_S)
        self.cluster.create("pods", manifests.traffic_pod(self.helm.hooks()))
        running = Traffic()
        try:
            self._wait_log("ready\n", TRAFFIC_START_S)
            yield running
            self.cluster.execute(manifests.TRAFFIC, "traffic", ["touch", manifests.STOP_FILE])
            running.report = Report.parse(self._wait_log(REPORT_PREFIX, TRAFFIC_END_S))
            progress(f"traffic: {running.report}")
        finally:
            if not running.report.calls:
                log = self.cluster.logs(manifests.TRAFFIC, "traffic", 30)
                progress(f"the traffic's last lines:\n{log}")
            self.cluster.delete(pods)

    def _no_traffic(self) -> str:
        names = {pod["metadata"]["name"] for pod in self.cluster.pods(f"app={manifests.TRAFFIC}")}
        return ", ".join(names)

    def _wait_log(self, text: str, timeout_s: float) -> str:
        """Wait until the traffic has printed a text; return its log."""
        log = ""

        def missing() -> str:
            nonlocal log
            pod = self.cluster.call("GET", self.cluster.path("pods", manifests.TRAFFIC))
            phase = pod["status"].get("phase")  # before the log, which is then the whole one
            log = self.cluster.logs(manifests.TRAFFIC, "traffic")
            if text in log:
                return ""
            if phase in ("Succeeded", "Failed"):
                raise ClusterError(f"the traffic ended ({phase}) before {text!r}:\n{log[-3000:]}")
            return log[-300:].strip() or str(phase)

        wait_until(missing, f"traffic prints {text.strip()!r}", timeout_s)
        return log


@dataclass
class Traffic:
    """Traffic that runs, or has run.

    Attributes:
        report: What it counted, once it has ended.
    """

    report: Report = field(default_factory=lambda: Report({}))


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run without a cluster, images and Helm, before anything is collected. The
    Makefile has checked that the variables are set.
    """
    try:
        kubeconfig = Path(os.environ["KUBECONFIG"]).expanduser()
        image_values(os.environ["IMAGES"])
        find_helm()
        read_login()
        config.stash[CLUSTER] = Cluster.from_kubeconfig(kubeconfig, NAMESPACE)
    except ClusterError as exc:
        raise pytest.UsageError(str(exc)) from exc


def read_login() -> str:
    """Return the content of PULL_CONFIG; "" if it is not set."""
    path = os.environ.get("PULL_CONFIG", "")
    return usable_login(Path(path).expanduser(), os.environ["IMAGES"]) if path else ""


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the client."""
    if (cluster := config.stash.get(CLUSTER, None)) is not None:
        cluster.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the state of every pod, warnings and logs to the report of a failure, and print both:
    pytest's own report comes at the end of the whole run.
    """
    report = yield
    if report.failed:
        try:
            text = item.config.stash[CLUSTER].describe()
        except ClusterError as exc:
            text = f"cannot be described: {exc}"
        report.sections.append((f"namespace {NAMESPACE}", text))
        progress(f"{item.name} failed: {report.longreprtext}\n{text}")
    return report


@pytest.fixture(scope="session")
def installation(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Installation:
    """Install the release into a fresh namespace; afterwards both are gone, unless KEEP=1."""
    cluster, images, binary = request.config.stash[CLUSTER], os.environ["IMAGES"], find_helm()
    kubeconfig = Path(os.environ["KUBECONFIG"]).expanduser()
    chart = Helm.copy_chart(binary, tmp_path_factory.mktemp("chart") / "helm")
    login = read_login()
    pull_secret = manifests.PULL_SECRET if login else ""
    values = image_values(images, pull_secret)
    helm = Helm(binary, kubeconfig, cluster.namespace, chart, values)
    clean_up(cluster, helm)
    if os.environ.get("KEEP"):
        progress(f"KEEP is set: namespace {cluster.namespace} stays")
    else:
        # Not after a `yield`: if the installation fails, its report must come before the removal.
        request.addfinalizer(lambda: clean_up(cluster, helm))  # noqa: PT021
    cluster.create_namespace()
    if login:
        cluster.create("secrets", manifests.pull_secret(login))
    made = Installation(cluster, helm, images, pull_secret, cluster.objects())
    progress(f"installing {images} into {cluster.namespace}")
    helm.install(HELM_TIMEOUT_S)
    cluster.create("configmaps", manifests.scripts())
    return made


def clean_up(cluster: Cluster, helm: Helm) -> None:
    """Remove what this run or an earlier one has created, if anything."""
    try:
        cluster.call("GET", f"/api/v1/namespaces/{cluster.namespace}")
    except ApiError as exc:
        if exc.status != 404:
            raise
        return
    helm.uninstall(HELM_TIMEOUT_S)
    cluster.delete_namespace(DELETE_TIMEOUT_S)
