"""Names: valid whatever the release is called, and those of two releases in one namespace never
the same.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.helm.conftest import parsed

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest

EVERYTHING = [
    "--set",
    "webhook.enabled=true",
    "--set-json",
    f'models={{"{"m" * 20}": {{"model": "example/tiny-llama"}}, "{"r" * 12}":'
    ' {"model": "example/tiny-llama", "prefill": {}, "decode": {}}}',
]
LONGEST = "r" * 53
"""What Helm allows."""
LIMITS = {"StatefulSet": 52}
"""Its pods have names, and labels, that are longer than its own."""


def installed(chart: Chart, release: str, *arguments: str) -> list[Manifest]:
    answer = chart.run("template", release, str(chart.path), "--namespace", "inference", *arguments)
    assert answer.returncode == 0, answer.stderr
    return parsed(answer.stdout)


def names(manifests: list[Manifest]) -> set[tuple[str, str]]:
    return {(one["kind"], one["metadata"]["name"]) for one in manifests}


@pytest.mark.parametrize("more", [(), ("--set", f"fullnameOverride={'r' * 60}")])
@pytest.mark.parametrize("release", [LONGEST, "x", "lmcache"])
def test_names_fit_whatever_the_release_is_called(
    chart: Chart, release: str, more: tuple[str, ...]
) -> None:
    manifests = installed(chart, release, *EVERYTHING, *more)
    for kind, name in names(manifests):
        assert len(name) <= LIMITS.get(kind, 63), f"{kind} {name}"
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name), name
    for one in manifests:
        metadata = one["metadata"]
        assert all(len(value) <= 63 for value in metadata["labels"].values()), metadata["name"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("blue", "green"),
        ("team-inference-platform-production-eu", "team-inference-platform-production-us"),
        (LONGEST, f"{LONGEST[:-1]}s"),
    ],
)
def test_two_releases_share_a_namespace(chart: Chart, one: str, other: str) -> None:
    """No object of one is the other's, and no policy, budget or Service of one is about the
    other's pods.
    """
    ours, theirs = installed(chart, one, *EVERYTHING), installed(chart, other, *EVERYTHING)
    assert not names(ours) & names(theirs)
    pods = [
        workload["spec"]["template"]["metadata"]["labels"]
        for workload in theirs
        if "template" in workload.get("spec", {})
    ]
    assert len(pods) >= 6
    selectors = [
        manifest["spec"][name]
        for manifest in ours
        for name in ("selector", "podSelector")
        if manifest.get("spec", {}).get(name)
    ]
    assert len(selectors) >= 20
    for selector in selectors:
        wanted = selector.get("matchLabels", selector).items()
        assert not any(wanted <= labels.items() for labels in pods), selector


@pytest.mark.parametrize("release", ["1st", "a.b"])
def test_a_name_that_no_service_can_have_is_refused(chart: Chart, release: str) -> None:
    """Helm would take it, and the cluster refuse every Service."""
    answer = chart.run("template", release, str(chart.path))
    assert "set fullnameOverride" in answer.stderr
    assert names(installed(chart, release, "--set", "fullnameOverride=cache"))
