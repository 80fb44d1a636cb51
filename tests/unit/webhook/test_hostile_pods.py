"""Pods that are made to keep the webhook busy: everybody may send one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmcache_webhook.injection.injector import review_pod
from lmcache_webhook.injection.options import InjectionOptions
from lmcache_webhook.injection.pod import MAX_TEXT_CHARS
from lmcache_webhook.review.schemas import AdmissionRequest, GroupVersionKind
from lmcache_webhook.review.service import Reviewer

from tests.fixtures.pods import Pod, container, plain, pod
from tests.fixtures.time_bound import cpu_bound

HANG_S = 20.0
PIECES = [
    "vllm serve ", "${a}", "$(a)", '"', "'", "\\", "`", "\\\n", "#", "-m ", "vllm.entrypoints.cli.main ", "vllm", "/", ".", ":", "@", "-c",
    "--kv", "--kv-transfer-config", "--kv_offloading_", "_SERVICE_PORT", "_PORT_1_TCP", "lmcache_core.integrations.", "://", "!", " ", "\n",
]  # fmt: skip
MEMBERS = ("script", "image", "value", "variable", "annotation", "mount", "quantity", "name")


def with_text(member: str, text: str) -> Pod:
    """A pod that has a text in one of its members."""
    match member:
        case "script":
            return pod(container(command=["sh", "-c", text]))
        case "image":
            return pod(container(image=text))
        case "value":
            return pod(container(env=[{"name": "LMCACHE_LOCAL_DEVICE", "value": text}, {"name": "A", "value": text}]))
        case "variable":
            return pod(container(env=[{"name": f"LMCACHE_{text}", "value": "1"}]))
        case "annotation":
            return pod(container(), annotations={f"lmcache.io/{text}": text, "lmcache.io/arena-gb": text})
        case "mount":
            return pod(container(volumeMounts=[{"name": "x", "mountPath": text}]))
        case "quantity":
            return pod(container(resources={"limits": {"cpu": text, "memory": text}}))
        case _:
            return pod(container(name=text), annotations={"lmcache.io/container": text})


@pytest.mark.parametrize(
    ("member", "text"),
    [
        ("script", 'vllm serve "' + "${a}" * 40),
        ("script", 'vllm serve "' + "$(a)" * 40),
        ("image", "vllm" * 30_000 + "!"),
        ("variable", "_SERVICE_PORT" * 10_000 + "!"),
        ("script", "vllm \\\n" * 18_000),
        ("script", "--kv" * 30_000),
    ],
)
def test_no_text_keeps_the_webhook_busy(member: str, text: str, options: InjectionOptions) -> None:
    assert len(text) <= MAX_TEXT_CHARS
    with cpu_bound(HANG_S):
        assert review_pod(options, with_text(member, text), "team-a").verdict in ("injected", "declined")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(MEMBERS),
    st.lists(st.sampled_from(PIECES), max_size=3),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=3),
    st.lists(st.sampled_from(PIECES), max_size=2),
)
def test_repetitions_of_anything_take_little_time(
    options: InjectionOptions, member: str, head: list[str], middle: list[str], tail: list[str]
) -> None:
    """Of the form that makes regular expressions slow: a beginning, many repetitions, an end that does not match."""
    repeated = "".join(middle)
    text = "".join(head) + repeated * (100_000 // len(repeated)) + "".join(tail)
    with cpu_bound(HANG_S):
        review_pod(options, with_text(member, text), "team-a")


def test_texts_that_linux_does_not_take_are_not_read(options: InjectionOptions) -> None:
    outcome = review_pod(options, with_text("script", "x" * (MAX_TEXT_CHARS + 1)), "team-a")
    assert (outcome.verdict, outcome.operations) == ("unreadable", [])


def test_many_wrong_items_are_not_counted(options: InjectionOptions) -> None:
    with cpu_bound(HANG_S):
        outcome = review_pod(options, {"spec": {"containers": [1] * 500_000}}, "team-a")
    assert outcome.reason == "this is no pod that the webhook can read: 1 of its members are not"


def nested(depth: int) -> Any:
    found: Any = {}
    for _ in range(depth):
        found = {"a": found}
    return found


@pytest.mark.parametrize("depth", [10, 300, 450, 900, 980, 5000, 50_000])
@pytest.mark.parametrize("place", ["elsewhere", "annotated", "valueFrom"])
async def test_a_nested_pod_is_reviewed_or_left_alone(depth: int, place: str, options: InjectionOptions) -> None:
    document = plain()
    if place == "valueFrom":
        document["spec"]["containers"][0]["env"] = [{"name": "PYTHONPATH", "valueFrom": nested(depth)}]
    else:
        document["spec"]["affinity"] = nested(depth)
    request = AdmissionRequest.model_construct(
        uid="u", kind=GroupVersionKind(version="v1", kind="Pod"), namespace="team-a", object=document
    )
    if place == "annotated":
        document["spec"]["hostNetwork"] = True
    reviewer = Reviewer(options, 1000)
    answer = (await reviewer.answer(request)).response
    [verdict] = reviewer.counts
    assert verdict in {"elsewhere": ("injected",), "annotated": ("declined",), "valueFrom": ("injected", "unreadable")}[place]
    assert (answer.patch is None) == (verdict == "unreadable")
    if verdict == "unreadable":
        assert answer.warnings == ["this is no pod that the webhook can read: it is nested too deeply"]
    json.dumps(answer.model_dump())
