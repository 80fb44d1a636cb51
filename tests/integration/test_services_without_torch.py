"""Every service runs where torch is not installed: in an environment that has only the
distributions they name.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import Distribution, PathDistribution, distributions
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from tests.fixtures.service_process import running_service

ROOT = Path(__file__).resolve().parents[2]
SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])
SERVICES = {
    "lmcache_lookup": "lmcache-lookup",
    "lmcache_broker": "lmcache-broker",
    "lmcache_storage": "lmcache-storage",
    "lmcache_sidecar": "lmcache-sidecar",
    "lmcache_webhook": "lmcache-webhook",
}
FIGURES = {"lmcache_sidecar": "/v1/tiers", "lmcache_webhook": "/metrics"}
OURS = {
    "lmcache-core": "libs/lmcache_core/src",
    "lmcache-servicekit": "services/servicekit/src",
    "lmcache-node": "services/node/src",
    "lmcache-lookup": "services/lookup/src",
    "lmcache-broker": "services/p2p_broker/src",
    "lmcache-storage": "services/cache_storage/src",
    "lmcache-sidecar": "services/sidecar/src",
    "lmcache-webhook": "services/webhook/src",
}


def settings_of(package: str, directory: Path) -> dict[str, str]:
    options = {"PORT": "0"}
    if package in ("lmcache_storage", "lmcache_sidecar"):
        options["LM_PORT"] = "0"
    if package == "lmcache_storage":
        options["MEMORY_GB"] = "0.01"
    if package == "lmcache_sidecar":
        options |= {
            "ARENA_GB": "0.01",
            "ARENA_PATH": str(directory / "arena"),
            "SOCKET_PATH": str(directory / "s.sock"),
        }
    if package == "lmcache_webhook":
        options |= {
            "SIDECAR_IMAGE": "lmcache-sidecar:0.1.0",
            "PAYLOAD_IMAGE": "lmcache-payload:0.1.0",
        }
    return {f"{package.upper()}_{name}": value for name, value in options.items()}


@pytest.mark.parametrize("package", sorted(SERVICES))
def test_starts_without_torch(package: str, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "venv", SERVICES[package])
    seen = subprocess.run(
        [python, "-c", "import torch"], capture_output=True, text=True, check=False
    )
    assert "No module named 'torch'" in seen.stderr
    assert (
        subprocess.run([python, "-c", "import numpy"], capture_output=True, check=False).returncode
        != 0
    )
    with (
        running_service(package, tmp_path, settings_of(package, tmp_path), python) as service,
        httpx.Client(base_url=service.url, trust_env=False, timeout=60) as client,
    ):
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/readyz").status_code == 200
        assert client.get(FIGURES.get(package, "/v1/stats")).status_code == 200


def make_environment(directory: Path, distribution: str) -> Path:
    """A virtual environment with what `distribution` requires, transitively, and nothing else.

    Installing would take a network; links to what is installed here show the same files under the
    same names.
    """
    venv.create(directory, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = directory / "lib" / version / "site-packages"
    needed = closure(distribution)
    (target / "ours.pth").write_text(
        "".join(f"{ROOT / OURS[name]}\n" for name in sorted(needed & OURS.keys()))
    )
    for found in distributions(path=[str(SITE_PACKAGES)]):
        if canonical(found.name) in needed - OURS.keys():
            link(found, target)
    return directory / "bin" / "python"


def closure(distribution: str) -> set[str]:
    """Names of all distributions that `distribution` requires, itself included."""
    installed = {canonical(found.name): found for found in distributions(path=[str(SITE_PACKAGES)])}
    needed: set[tuple[str, str]] = set()
    waiting = [(distribution, "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in needed or name not in installed:
            continue
        needed.add((name, extra))
        for wanted in map(Requirement, installed[name].requires or []):
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                waiting += [(canonical(wanted.name), each) for each in ("", *wanted.extras)]
    return {name for name, _ in needed}


def link(found: Distribution, target: Path) -> None:
    """Link the top-level entries that a distribution brought to its site-packages."""
    assert isinstance(found, PathDistribution)
    tops = {Path(str(file)).parts[0] for file in found.files or []} - {"..", "__pycache__"}
    for top in tops:
        source, place = SITE_PACKAGES / top, target / top
        if source.exists() and not place.exists():
            place.symlink_to(source)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
