"""Pods with SGLang: they get the linker, or a sentence that says what is in its way."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from lmcache_webhook.injection.plan import CONNECTOR, REPLACE, InjectionOptions

from tests.fixtures.pods import container as container_of
from tests.fixtures.pods import pod
from tests.fixtures.reviews import declined, injected

SERVER = ["python3", "-m", "sglang.launch_server"]
MODEL = ["--model-path", "m", "--host", "0.0.0.0"]


def container(**members: Any) -> Any:
    return container_of("engine", **{"image": "registry/engine:1"} | members)


def engine_of(document: Any) -> Any:
    return document["spec"]["containers"][0]


def linker_in(words: list[str]) -> Any:
    """The linker's configuration, which stands behind what turns it on."""
    assert "--enable-unified-cache-external-linker" in words
    assert words[words.index("--unified-cache-external-linker-backend") + 1] == "dynamic"
    return json.loads(words[words.index("--unified-cache-external-linker-config") + 1])


@pytest.mark.parametrize(
    "members",
    [
        {"command": [*SERVER, *MODEL]},
        {"command": SERVER, "args": MODEL},
        {"args": [*SERVER, *MODEL], "image": "lmsysorg/sglang:v0.5.23"},
        {"command": ["sglang", "serve"], "args": MODEL},
    ],
)
def test_the_linker_is_appended(options: InjectionOptions, members: dict[str, Any]) -> None:
    engine = engine_of(injected(options, pod(container(**members))))
    given = members.get("args", [])
    assert engine["args"][: len(given)] == given
    config = linker_in(engine["args"])
    assert config["linker_module_path"] == "lmcache_core.integrations.sglang"
    assert config["linker_extra_config"] == {"sidecar_socket": "/run/lmcache/socket/sidecar.sock"}
    assert engine["args"][engine["args"].index("--page-size") + 1] == "64"
    assert "--kv-transfer-config" not in engine["args"]
    assert "--kv-events-config" not in engine["args"]
    (path,) = [one["value"] for one in engine["env"] if one["name"] == "PYTHONPATH"]
    assert path == "/opt/lmcache/python"


@pytest.mark.parametrize("words", [["--page-size", "128"], ["--page-size=128"]])
def test_a_page_size_that_is_given_stays(options: InjectionOptions, words: list[str]) -> None:
    engine = engine_of(injected(options, pod(container(command=SERVER, args=words))))
    assert [word for word in engine["args"] if word.startswith("--page-size")] == words[:1]


def test_one_command_of_a_shell_is_extended(options: InjectionOptions) -> None:
    script = f"exec {' '.join([*SERVER, *MODEL])}"
    engine = engine_of(injected(options, pod(container(command=["sh", "-c", script]))))
    words = shlex.split(engine["command"][-1])
    assert words[:4] == ["exec", *SERVER]
    assert linker_in(words)["linker"] == "LMCacheLinker"


def test_a_linker_that_is_there_stays(options: InjectionOptions) -> None:
    config = {"linker_module_path": "lmcache_core.integrations.sglang"}
    words = ["--unified-cache-external-linker-config", json.dumps(config)]
    engine = engine_of(injected(options, pod(container(command=SERVER, args=words))))
    assert engine["args"] == words


@pytest.mark.parametrize(
    "word",
    [
        *("--enable-hierarchical-cache", "--enable-lmcache", "--disable-radix-cache"),
        *("--unified-cache-external-linker-backend=mooncake", "--hicache-storage-backend"),
    ],
)
def test_another_cache_is_named(options: InjectionOptions, word: str) -> None:
    reason = declined(options, pod(container(command=SERVER, args=[word])))
    assert f"given {word.partition('=')[0]}" in reason


@pytest.mark.parametrize("annotation", [{CONNECTOR: "offloading-tier"}, {REPLACE: "true"}])
def test_what_only_vllm_has_is_refused(
    options: InjectionOptions, annotation: dict[str, str]
) -> None:
    document = pod(container(command=SERVER, args=MODEL), annotations=annotation)
    assert "SGLang" in declined(options, document)
