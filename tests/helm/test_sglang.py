"""A model of SGLang: its server, the linker, and what the pod does when it is to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.helm.conftest import MODEL, both_helms, option_of
from tests.helm.test_operations_autoscaling import KEDA

if TYPE_CHECKING:
    from tests.helm.conftest import Chart

SGLANG = MODEL | {
    "engine": "sglang",
    "image": {"repository": "lmsysorg/sglang", "tag": "v0.5.23"},
}


LINKER = "--unified-cache-external-linker-config"


def value_of(words: list[str], name: str) -> str:
    """The word behind an option."""
    return words[words.index(name) + 1]


def engine_of(chart: Chart, **values: Any) -> Any:
    return chart.render({"models.tiny": SGLANG | values}).pod("vllm-tiny")["containers"][0]


@both_helms
def test_it_starts_with_the_linker(chart: Chart, helm: str) -> None:
    rendering = chart.render({"models.tiny": SGLANG}, helm=helm)
    engine = rendering.pod("vllm-tiny")["containers"][0]
    assert engine["image"] == "docker.io/lmsysorg/sglang:v0.5.23"
    assert engine["command"] == ["python3", "-m", "sglang.launch_server"]
    words = engine["args"]
    assert value_of(words, "--model-path") == MODEL["model"]
    assert value_of(words, "--page-size") == "64"
    assert "--enable-metrics" in words
    assert not [word for word in words if word.startswith(("--kv-", "--tensor"))]
    assert value_of(words, "--unified-cache-external-linker-backend") == "dynamic"
    assert option_of(engine, LINKER) == {
        "linker": "LMCacheLinker",
        "linker_module_path": "lmcache_core.integrations.sglang",
        "linker_extra_config": {"lmcache.sidecar_socket": "/run/lmcache/socket/sidecar.sock"},
    }
    env = {one["name"]: one.get("value") for one in engine["env"]}
    assert env["PYTHONPATH"] == "/opt/lmcache/python"


def test_its_values_become_its_arguments(chart: Chart) -> None:
    engine = engine_of(
        chart,
        tensorParallelSize=2,
        extraArgs=["--page-size=128"],
        connector={"options": {"lmcache.prefill_tokens_per_s": 9000}},
        command=["sglang", "serve"],
    )
    words = engine["args"]
    assert engine["command"] == ["sglang", "serve"]
    assert value_of(words, "--tp-size") == "2"
    assert "--page-size" not in words
    extra = option_of(engine, LINKER)
    assert extra["linker_extra_config"]["lmcache.prefill_tokens_per_s"] == 9000


def test_without_the_cache_it_is_sglang_alone(chart: Chart) -> None:
    engine = engine_of(chart, connector={"enabled": False}, extraArgs=["--enable-lmcache"])
    assert not [word for word in engine["args"] if "linker" in word or word == "--page-size"]


def test_events_of_other_models_leave_it_alone(chart: Chart) -> None:
    """Its own publisher has other options."""
    rendering = chart.render({"models.tiny": SGLANG, "kvEvents.enabled": True})
    engine = rendering.pod("vllm-tiny")["containers"][0]
    assert [port["containerPort"] for port in engine["ports"]] == [8000]
    assert not [word for word in engine["args"] if "events" in word]


def test_it_scales_by_its_own_queue(chart: Chart) -> None:
    scaled = {"models.tiny": SGLANG, "modelDefaults.autoscaling.loadPerPod": 5}
    spec = chart.render(KEDA | scaled).by_name("ScaledObject")["vllm-tiny"]
    queries = [trigger["metadata"].get("query", "") for trigger in spec["triggers"]]
    assert any(query.startswith("sum(sglang:num_queue_reqs{") for query in queries), queries
