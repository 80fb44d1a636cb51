"""The documented bins, the derived ones, and what is refused."""

from __future__ import annotations

import json
import os

import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.serde.cachegen import (
    MAX_LAYERS,
    MAX_MODEL_CONFIG_BYTES,
    CacheGenConfig,
    QuantizationSpec,
)

DOCUMENTED = {
    "mistralai/Mistral-7B-Instruct-v0.2": 32,
    "lmsys/longchat-7b-16k": 32,
    "Qwen/Qwen-7B": 32,
    "meta-llama/Llama-3.1-8B-Instruct": 32,
    "THUDM/glm-4-9b-chat": 40,
    "test_model": 32,
}


@pytest.mark.parametrize(("name", "layers"), DOCUMENTED.items())
def test_documented_models(name: str, layers: int) -> None:
    config = CacheGenConfig.from_model_name(name)
    assert config.nlayers == layers
    assert config.bins_of_keys() == (32,) * 10 + (16,) * (layers - 10)
    assert config.bins_of_values() == (32,) * 2 + (16,) * (layers - 2)


@pytest.mark.parametrize(
    "name", ["/models/glm-4-9b-chat", "models/GLM-4-9B-chat/", "C:\\models\\glm-4-9b-chat"]
)
def test_a_documented_model_is_known_by_its_last_part(name: str) -> None:
    assert CacheGenConfig.from_model_name(name).nlayers == 40


@pytest.mark.parametrize(
    "described",
    [
        {"num_hidden_layers": 12},
        {"n_layer": 12},
        {"num_hidden_layers": None, "num_layers": 12},
        {"num_hidden_layers": True, "text_config": {"num_hidden_layers": 12}},
    ],
)
def test_the_layers_of_a_directory_are_those_of_its_config(tmp_path, described) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert CacheGenConfig.from_model_name(str(tmp_path)) == CacheGenConfig.for_num_layers(12)


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",
        b"[12]",
        b"[" * 100_000,
        b'{"num_hidden_layers": "12"}',
        b'{"num_hidden_layers": %d}' % (MAX_LAYERS + 1),
        b'{"num_hidden_layers": 12, "a": "' + b" " * MAX_MODEL_CONFIG_BYTES + b'"}',
        b'{"num_hidden_layers": ' + b"9" * 5000 + b"}",
    ],
    ids=range(7),
)
def test_an_unusable_config_of_a_directory_means_the_default(tmp_path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    assert CacheGenConfig.from_model_name(str(tmp_path)) == CacheGenConfig.for_num_layers(32)


def test_a_pipe_is_not_waited_for(tmp_path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert CacheGenConfig.from_model_name(str(tmp_path)).nlayers == 32


def test_layers_beyond_have_the_bins_of_the_last() -> None:
    config = CacheGenConfig(
        2, [QuantizationSpec(0, 1, 64), QuantizationSpec(1, 9, 8)], [QuantizationSpec(0, 2, 4)]
    )
    assert config.bins_of_keys() == (64, 8)
    assert config.bins_of_keys(4) == (64, 8, 8, 8)
    assert config.bins_of_keys(1) == (64,)
    assert config.bins_of_keys(0) == ()
    assert config.bins_of_values(3) == (4, 4, 4)


@pytest.mark.parametrize("bins", [2, 5, 258, -4, 32.0, True])
def test_unusable_bins(bins) -> None:
    with pytest.raises(ConfigError, match="even number, 4 to 256"):
        QuantizationSpec(0, 1, bins)


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (1, 1), (0, MAX_LAYERS + 1), (0.0, 1)])
def test_unusable_layers(start, end) -> None:
    with pytest.raises(ConfigError, match="start_layer < end_layer"):
        QuantizationSpec(start, end, 32)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([(0, 3)], "add a spec for layers 3 to 4"),
        ([(1, 4)], "must begin at 0"),
        ([(0, 1), (2, 4)], "must begin at 1"),
        ([(0, 3), (2, 4)], "must begin at 3"),
    ],
)
def test_specs_cover_every_layer_once(specs, message: str) -> None:
    wrong = [QuantizationSpec(start, end, 32) for start, end in specs]
    right = [QuantizationSpec(0, 4, 32)]
    with pytest.raises(ConfigError, match=f"kspecs.*{message}"):
        CacheGenConfig(4, wrong, right)
    with pytest.raises(ConfigError, match=f"vspecs.*{message}"):
        CacheGenConfig(4, right, wrong)


@pytest.mark.parametrize("name", ["", "an/unknown-model", "a\0b", "x" * 10_000, "/proc/self/mem"])
def test_no_name_is_refused(name: str) -> None:
    assert CacheGenConfig.from_model_name(name) == CacheGenConfig.for_num_layers(32)


@pytest.mark.parametrize("layers", [0, MAX_LAYERS + 1, 1.0, True])
def test_unusable_numbers_of_layers(layers) -> None:
    with pytest.raises(ConfigError, match=f"1 to {MAX_LAYERS}"):
        CacheGenConfig.for_num_layers(layers)
    with pytest.raises(ConfigError, match=f"1 to {MAX_LAYERS}"):
        CacheGenConfig(layers, [QuantizationSpec(0, 4, 32)], [QuantizationSpec(0, 4, 32)])
