"""The `helm` binary, for one release."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tests.cluster.names import RELEASE, VALUES
from tests.cluster.waiting import ClusterError

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "lmcache"
OLDEST = (3, 14)
POD_MONITORS = (
    *("--set", "monitoring.podMonitors.enabled=true"),
    *("--set-json", 'networkPolicy.metricsFrom=[{"podSelector": {}}]'),
)
"""Values for a cluster that knows PodMonitors."""


def find_helm() -> str:
    """Return the path of a recent enough Helm: the one on PATH, else the one of `make helm-check`.

    Raises:
        ClusterError: There is none.
    """
    fetched = ROOT / ".tools" / "helm4"
    found = shutil.which("helm") or (str(fetched) if fetched.is_file() else None)
    wanted = f"{OLDEST[0]}.{OLDEST[1]}"
    if found is None:
        raise ClusterError(f"helm is not on PATH: install Helm {wanted} or later")
    version = subprocess.run(
        [found, "version", "--short"], capture_output=True, text=True, timeout=60, check=False
    ).stdout.strip()
    numbers = re.match(r"v(\d+)\.(\d+)\.", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise ClusterError(f"{found} is version {version!r}: Helm {wanted} or later is needed")
    return found


def image_values(images: str, pull_secret: str = "") -> list[str]:
    """Return the arguments that make the chart run these images.

    Args:
        images: `registry/path:tag`; the registry may have a port.
        pull_secret: Name of the Secret with the registry's login, if it needs one.

    Raises:
        ClusterError: It is not of that form.
    """
    registry, separator, tag = images.rpartition(":")
    if not separator or not registry or not re.fullmatch(r"\w[\w.-]{0,127}", tag):
        raise ClusterError(
            f"IMAGES={images}: must be registry/path:tag, for example"
            " registry.example.com/lmcache:0.1.0"
        )
    pairs = [
        f"{place}.{name}={value}"
        for place in ("images", "modelDefaults.image")
        for name, value in (("registry", registry), ("tag", tag))
    ]
    if pull_secret:
        pairs.append(f"imagePullSecrets[0].name={pull_secret}")
    return [word for pair in pairs for word in ("--set-string", pair)]


class Helm:
    """One release of the chart.

    Args:
        binary: Path of `helm`.
        kubeconfig: Kubeconfig whose current context is used.
        namespace: The release's.
        chart: A copy of the chart whose dependency is built.
        values: Arguments of every installation and upgrade.
    """

    def __init__(
        self, binary: str, kubeconfig: Path, namespace: str, chart: Path, values: list[str]
    ) -> None:
        self._binary = binary
        self._where = ["--namespace", namespace, "--kubeconfig", str(kubeconfig)]
        self._chart = chart
        self._values = ["--values", str(ROOT / VALUES), *values]

    @staticmethod
    def copy_chart(binary: str, folder: Path) -> Path:
        """Copy the chart to `folder` and build its dependency there, not in the checkout."""
        shutil.copytree(CHART.parent, folder, ignore=shutil.ignore_patterns("*.tgz"))
        run([binary, "dependency", "build", str(folder / CHART.name)], 120)
        return folder / CHART.name

    def install(self, timeout_s: int) -> None:
        """Install the release without waiting for its pods."""
        self._run("install", timeout_s, RELEASE, str(self._chart), *self._values)

    def upgrade(self, timeout_s: int, *more: str) -> None:
        """Upgrade it with further values."""
        self._run("upgrade", timeout_s, RELEASE, str(self._chart), *self._values, *more)

    def rollback(self, timeout_s: int) -> None:
        """Go back by one revision."""
        self._run("rollback", timeout_s, RELEASE)

    def test(self, timeout_s: int) -> str:
        """Run `helm test --logs`; return what it printed."""
        return self._run("test", timeout_s, RELEASE, "--logs")

    def uninstall(self, timeout_s: int) -> None:
        """Uninstall the release, if it exists."""
        self._run("uninstall", timeout_s, RELEASE, "--ignore-not-found")

    def hooks(self) -> str:
        """Return the manifests of the release's hooks."""
        return run([self._binary, "get", "hooks", RELEASE, *self._where], 60)

    def manifest(self) -> str:
        """Return the manifests of the release's objects that are no hooks."""
        return run([self._binary, "get", "manifest", RELEASE, *self._where], 60)

    def _run(self, command: str, timeout_s: int, *words: str) -> str:
        line = [self._binary, command, *words, *self._where, "--timeout", f"{timeout_s}s"]
        return run(line, timeout_s + 60)


def run(command: list[str], timeout_s: float) -> str:
    """Run a command; return what it printed.

    Raises:
        ClusterError: It failed, or did not end in time.
    """
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise ClusterError(f"{' '.join(command)}: not done after {timeout_s:g} s") from exc
    if answer.returncode != 0:
        raise ClusterError(
            f"{' '.join(command)}: exit code {answer.returncode}:"
            f" {answer.stdout[-3000:]}{answer.stderr[-3000:]}"
        )
    return answer.stdout
