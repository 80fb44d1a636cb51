"""Whatever the pod: nothing is raised, the patch fits, and a second review changes nothing."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import jsonpatch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmcache_webhook.injection.injector import review_pod
from lmcache_webhook.injection.plan import InjectionOptions

from tests.releases import NEWEST_VLLM

USERS = st.integers(0, 9)
ASKED = [
    f"lmcache.io/{name}"
    for name in ("inject", "arena-gb", "tenant", "container", "inject-status", "connector")
]
NAMES = st.sampled_from(
    ["vllm", "engine", "lmcache-sidecar", "lmcache-payload", "lmcache-arena", "x~/y"]
)
WORDS = (
    *("vllm", "serve", "m", "sh", "-c", "-m", "vllm.entrypoints.openai.api_server"),
    *("vllm serve m", "--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1"}'),
)
TEXTS = st.sampled_from(WORDS) | st.text(max_size=8)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def lists(strategy: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[Any]:
    return maybe(st.lists(strategy, max_size=most))


VARIABLES = st.fixed_dictionaries(
    {"name": st.sampled_from(["PYTHONPATH", "HOME", "LMCACHE_CHUNK_SIZE", "LMCACHE_NO_SUCH"])},
    optional={
        "value": maybe(TEXTS),
        "valueFrom": maybe(st.just({"fieldRef": {"fieldPath": "metadata.name"}})),
    },
)
CONTAINERS = st.fixed_dictionaries(
    {"name": NAMES},
    optional={
        "image": maybe(st.sampled_from([f"vllm/vllm-openai:v{NEWEST_VLLM}", "nginx", "", "vllm"])),
        "command": lists(TEXTS, 5),
        "args": lists(TEXTS, 5),
        "env": lists(VARIABLES),
        "ports": lists(st.just({"containerPort": 8000}) | st.just({"containerPort": 8083})),
        "volumeMounts": lists(
            st.fixed_dictionaries(
                {
                    "name": NAMES,
                    "mountPath": st.sampled_from(["/a", "/opt/lmcache", "/", "/dev/shm"]),
                }
            )
        ),
        "securityContext": maybe(
            st.fixed_dictionaries({}, optional={"runAsUser": maybe(USERS), "runAsGroup": USERS})
        ),
        "resources": maybe(
            st.fixed_dictionaries(
                {}, optional={"limits": maybe(st.just({"cpu": "1", "memory": "1Gi"}))}
            )
        ),
        "else": ANYTHING,
    },
)
ANNOTATIONS = st.dictionaries(
    st.sampled_from([*ASKED, "a/b~c"]),
    st.sampled_from(["true", "1", "a", "vllm", "", "1e9", "é", "offloading-tier"]),
    max_size=4,
)
PODS = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {"labels": st.just({"lmcache.io/inject": "true"})},
            optional={"annotations": maybe(ANNOTATIONS), "name": TEXTS},
        ),
        "spec": st.fixed_dictionaries(
            {"containers": st.lists(CONTAINERS, min_size=1, max_size=3)},
            optional={
                "initContainers": lists(CONTAINERS),
                "volumes": lists(st.fixed_dictionaries({"name": NAMES})),
                "hostNetwork": maybe(st.booleans()),
                "hostIPC": maybe(st.booleans()),
                "else": ANYTHING,
            },
        ),
    }
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(PODS)
def test_the_patch_fits_and_is_the_last(
    options: InjectionOptions, document: dict[str, Any]
) -> None:
    before = copy.deepcopy(document)
    outcome = review_pod(options, document, "team-a")
    assert document == before
    changed = jsonpatch.apply_patch(document, outcome.operations)
    assert review_pod(options, changed, "team-a").operations == []
    if outcome.verdict == "injected":
        added = [one["name"] for one in changed["spec"]["initContainers"]][-2:]
        assert added == ["lmcache-payload", "lmcache-sidecar"]
        own = [volume["name"] for volume in before["spec"].get("volumes") or ()]
        names = [volume["name"] for volume in changed["spec"]["volumes"]]
        ours = Counter(names) - Counter(own)
        assert set(ours.values()) == {1}
        assert not ours.keys() & set(own)
    else:
        at = "/metadata/annotations"
        changes = {one["path"] for one in outcome.operations}
        assert changes <= {at, f"{at}/lmcache.io~1inject-status"}


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.sampled_from(["metadata", "spec", "kind"]), ANYTHING, max_size=3))
def test_anything_else_is_let_through(options: InjectionOptions, document: dict[str, Any]) -> None:
    assert review_pod(options, document, "team-a").operations == []
