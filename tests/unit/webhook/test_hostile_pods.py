"""Pods that are made to keep the webhook busy: anyone may send one."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from lmcache_core.config.foreign_names import FOREIGN_NAMES
from lmcache_core.config.sources import MAX_FOREIGN_CHARS
from lmcache_webhook.injection.injector import MAX_STATUS_CHARS, review_pod
from lmcache_webhook.injection.plan import InjectionOptions
from lmcache_webhook.injection.pod import MAX_TEXT_CHARS
from lmcache_webhook.reviews import REVIEW_TIMEOUT_S, Reviewer

from tests.fixtures.pods import Pod, container, plain, pod
from tests.fixtures.reviews import asked
from tests.fixtures.time_bound import cpu_bound

REPLACE = {"lmcache.io/replace-connector": "true"}
BUSY_S = 10 * REVIEW_TIMEOUT_S
"""Of CPU time: an expression that explodes takes longer on any machine."""
MAX_BODY_BYTES = 1 << 20
FIFTH = MAX_BODY_BYTES // 5
LMCACHE = '{"kv_connector": "LMCacheConnectorV1"}'
LINKS = f"LMCACHE_{'_SERVICE_PORT_' * 9000}"
LAUGHS = (
    ",".join(
        [
            "[&a [x,x,x,x,x,x,x,x]",
            *(f"&{name} [{','.join([f'*{of}'] * 8)}]" for of, name in pairwise("abcdefghijkl")),
        ]
    )
    + "]"
)
"""Each alias stands for eight of the one before: 69 billion texts when it is expanded."""


def foreign(text: str) -> list[dict[str, str]]:
    """Every variable of another release, with one text."""
    return [{"name": f"LMCACHE_{name.upper()}", "value": text} for name in FOREIGN_NAMES]


def replaceable(extra: dict[str, Any]) -> Pod:
    """A pod with LMCache's connector, to be replaced."""
    config = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra}
    return pod(container(args=["--kv-transfer-config", json.dumps(config)]), annotations=REPLACE)


def with_text(member: str, text: str) -> Pod:
    """A pod that has a text in one of its members."""
    match member:
        case "script":
            return pod(container(command=["sh", "-c", text]))
        case "image":
            return pod(container(image=text))
        case "value":
            names = ("LMCACHE_LOCAL_DEVICE", "A")
            return pod(container(env=[{"name": name, "value": text} for name in names]))
        case "values":
            env = foreign(text[: MAX_BODY_BYTES // len(FOREIGN_NAMES)])
            return pod(container(command=["vllm", "serve"], env=env))
        case "variable":
            return pod(container(env=[{"name": f"LMCACHE_{text}", "value": "1"}]))
        case "annotation":
            names = (f"lmcache.io/{text}", "lmcache.io/arena-gb")
            return pod(container(), annotations=dict.fromkeys(names, text))
        case "mount":
            return pod(container(volumeMounts=[{"name": "x", "mountPath": text}]))
        case "config":
            return pod(container(args=["--kv-transfer-config", text]), annotations=REPLACE)
        case "extra":
            names = ("lmcache.local_device", "lmcache.extra_config", f"lmcache.{text}")
            return replaceable(dict.fromkeys(names, text))
        case "quantity":
            return pod(container(resources={"limits": {"cpu": text, "memory": text}}))
        case _:
            return pod(container(name=text), annotations={"lmcache.io/container": text})


@pytest.mark.parametrize(
    ("member", "text"),
    [
        ("script", 'vllm serve "' + "${a}" * 40),
        ("image", "vllm" * 30_000 + "!"),
        ("variable", "_SERVICE_PORT" * 10_000 + "!"),
        ("script", "vllm \\\n" * 18_000),
        ("script", "vllm serve " + "a " * 50_000 + ";"),
        ("script", "vllm serve " + " \\\n" * 40_000 + "'"),
        ("script", 'vllm serve "' + '\\"' * 60_000),
        ("script", "--kv" * 30_000),
        ("values", "[" + ("[" * 90 + "]" * 90 + ",") * 600 + "]"),
        ("values", LAUGHS),
        ("value", "[" * 1000),
        ("mount", "/a" * 60_000),
        ("config", "[" * 100_000),
        ("extra", "x" * 5_000),
    ],
)
def test_no_text_keeps_the_webhook_busy(member: str, text: str, options: InjectionOptions) -> None:
    assert len(text) <= MAX_TEXT_CHARS
    with cpu_bound(BUSY_S):
        outcome = review_pod(options, with_text(member, text), "team-a")
    assert outcome.verdict in ("injected", "declined")


def test_texts_that_linux_does_not_take_are_not_read(options: InjectionOptions) -> None:
    outcome = review_pod(options, with_text("script", "x" * (MAX_TEXT_CHARS + 1)), "team-a")
    assert (outcome.verdict, outcome.operations) == ("unreadable", [])


def test_many_wrong_items_are_not_counted(options: InjectionOptions) -> None:
    with cpu_bound(BUSY_S):
        outcome = review_pod(options, {"spec": {"containers": [1] * 500_000}}, "team-a")
    assert outcome.reason == "this is not a pod that the webhook can read: 1 of its members are not"


def filled(item: Any) -> list[Any]:
    """As many of an item as a review has room for."""
    return [item] * (MAX_BODY_BYTES // (len(json.dumps(item, separators=(",", ":"))) + 1))


@pytest.mark.realtime
@pytest.mark.parametrize(
    "members",
    [
        {"initContainers": filled({"name": "", "resources": {"limits": {"cpu": 1, "memory": 1}}})},
        {"volumes": filled({"name": ""})},
        {"containers": filled({"name": "", "image": "vllm"})},
        {"volumeMounts": filled({"name": "", "mountPath": ""})},
        {"volumeMounts": [{"name": "", "mountPath": "/a" * FIFTH + "/.." * FIFTH}]},
        {"args": filled("--kv-transfer-config")},
        {"env": filled({"name": "LMCACHE_MP_"}), "args": [f"--kv-transfer-config={LMCACHE}"]},
        {"env": filled({"name": "PYTHONPATH", "valueFrom": {}})},
        {"env": [{"name": f"{LINKS}{i}!", "value": "tcp://"} for i in range(8)]},
        {"env": foreign("a: 1\n" * 26)},
        {"affinity": [[]] * (MAX_BODY_BYTES // 3)},
        {"annotations": {f"lmcache.io/{'arena-gb' * (MAX_BODY_BYTES // 8)}": "1"}},
        {"annotations": {"lmcache.io/arena-gb": "1" * MAX_BODY_BYTES}},
        {"name": "a" * MAX_BODY_BYTES},
    ],
    ids=lambda members: next(iter(members)),
)
def test_a_whole_body_of_anything_takes_little_time(
    members: dict[str, Any], options: InjectionOptions
) -> None:
    document = pod(container(command=["vllm", "serve"]), annotations=dict(REPLACE))
    spec, metadata = document["spec"], document["metadata"]
    for name, value in members.items():
        if name == "annotations":
            metadata[name] = value
        elif name == "containers":
            spec[name] = [*value, *spec[name]]
        elif name in ("initContainers", "volumes", "affinity"):
            spec[name] = value
        else:
            spec["containers"][0][name] = value
    with cpu_bound(REVIEW_TIMEOUT_S):
        outcome = review_pod(options, document, "team-a")
    assert outcome.verdict in ("injected", "declined")
    assert len(outcome.reason) <= MAX_STATUS_CHARS


def test_the_options_of_a_container_have_a_bound(options: InjectionOptions) -> None:
    document = pod(container(command=["vllm", "serve"], env=foreign("x" * MAX_FOREIGN_CHARS)))
    outcome = review_pod(options, document, "team-a")
    assert outcome.verdict == "declined"
    assert (
        "the variables LMCACHE_… of the container vllm have"
        f" {len(FOREIGN_NAMES) * MAX_FOREIGN_CHARS} characters" in outcome.reason
    )


def nested(depth: int) -> Any:
    found: Any = {}
    for _ in range(depth):
        found = {"a": found}
    return found


@pytest.mark.parametrize("depth", [10, 450, 980, 50_000])
@pytest.mark.parametrize("place", ["elsewhere", "annotated", "valueFrom"])
async def test_nested_pod_is_reviewed_or_left_alone(
    depth: int, place: str, options: InjectionOptions
) -> None:
    document = plain()
    if place == "valueFrom":
        document["spec"]["containers"][0]["env"] = [
            {"name": "PYTHONPATH", "valueFrom": nested(depth)}
        ]
    else:
        document["spec"]["affinity"] = nested(depth)
    if place == "annotated":
        document["spec"]["hostNetwork"] = True
    reviewer = Reviewer(options, 1000)
    answer = (await reviewer.answer(asked(document))).response
    [verdict] = reviewer.counts
    allowed = {"elsewhere": ["injected"], "annotated": ["declined"]}
    assert verdict in allowed.get(place, ["injected", "unreadable"])
    assert (answer.patch is None) == (verdict == "unreadable")
    if verdict == "unreadable":
        assert answer.warnings == [
            "this is not a pod that the webhook can read: it is nested too deeply"
        ]
    json.dumps(answer.model_dump())
