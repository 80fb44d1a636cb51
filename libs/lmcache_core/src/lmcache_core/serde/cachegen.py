"""The number of bins that each layer's keys and values are quantised to. No torch, no numba.

The other documented names of this module are resolved on first use: they need both, and are in
`lmcache_core.documented.cachegen`.

Source: the documented CacheGen configurations. Early layers lose more output quality for the same
    error than later ones (Liu et al., "CacheGen: KV Cache Compression and Streaming for Fast Large
    Language Model Serving", SIGCOMM 2024, section 5.1.2), and get more bins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import ConfigError
from lmcache_core.extras import resolve

if TYPE_CHECKING:
    from lmcache_core.documented.cachegen.outputs import (
        CacheGenEncoderOutput,
        CacheGenGPUBytestream,
        CacheGenGPUEncoderOutput,
    )
    from lmcache_core.documented.cachegen.quantization import (
        CacheGenEncoderImpl,
        concat_max,
        do_dequantize,
        quant,
        torch_quant,
        torch_quant_vectorized,
    )
    from lmcache_core.documented.cachegen.streams import (
        collect_bytes,
        decode_chunk,
        decode_function_gpu,
        encode_function,
        encode_ntokens,
        recombine_bytes,
    )

_RESOLVED_LATER = MappingProxyType(
    {
        "CacheGenEncoderImpl": "documented.cachegen.quantization",
        "CacheGenEncoderOutput": "documented.cachegen.outputs",
        "CacheGenGPUBytestream": "documented.cachegen.outputs",
        "CacheGenGPUEncoderOutput": "documented.cachegen.outputs",
        "collect_bytes": "documented.cachegen.streams",
        "concat_max": "documented.cachegen.quantization",
        "decode_chunk": "documented.cachegen.streams",
        "decode_function_gpu": "documented.cachegen.streams",
        "do_dequantize": "documented.cachegen.quantization",
        "encode_function": "documented.cachegen.streams",
        "encode_ntokens": "documented.cachegen.streams",
        "quant": "documented.cachegen.quantization",
        "recombine_bytes": "documented.cachegen.streams",
        "torch_quant": "documented.cachegen.quantization",
        "torch_quant_vectorized": "documented.cachegen.quantization",
    }
)

__all__ = [
    "CacheGenConfig",
    "CacheGenEncoderImpl",
    "CacheGenEncoderOutput",
    "CacheGenGPUBytestream",
    "CacheGenGPUEncoderOutput",
    "QuantizationSpec",
    "collect_bytes",
    "concat_max",
    "decode_chunk",
    "decode_function_gpu",
    "do_dequantize",
    "encode_function",
    "encode_ntokens",
    "quant",
    "recombine_bytes",
    "torch_quant",
    "torch_quant_vectorized",
]

FINE_BINS = 32
COARSE_BINS = 16
MIN_BINS = 4
MAX_BINS = 256
MAX_LAYERS = 4096
SHALLOW_LAYERS = 10
"""A model with fewer layers than this has fine bins in all of them."""
FINE_KEY_LAYERS = 10
FINE_VALUE_LAYERS = 2
DEFAULT_LAYERS = 32
"""Assumed for an unknown model."""
MAX_MODEL_CONFIG_BYTES = 4 << 20

DOCUMENTED_LAYERS = MappingProxyType(
    {
        "mistralai/Mistral-7B-Instruct-v0.2": 32,
        "lmsys/longchat-7b-16k": 32,
        "Qwen/Qwen-7B": 32,
        "meta-llama/Llama-3.1-8B-Instruct": 32,
        "THUDM/glm-4-9b-chat": 40,
        "test_model": 32,
    }
)
"""The documented models and their layers."""

_LAYER_FIELDS = ("num_hidden_layers", "n_layer", "num_layers")


@dataclass(frozen=True)
class QuantizationSpec:
    """Bins of a run of layers.

    Attributes:
        end_layer: One past its last layer.
        bins: Even, 4 to 256; `bins - 1` values are used, symmetric around zero.

    Raises:
        ConfigError: Out of these bounds.
    """

    start_layer: int
    end_layer: int
    bins: int

    def __post_init__(self) -> None:
        if not (
            _is_int(self.start_layer)
            and _is_int(self.end_layer)
            and 0 <= self.start_layer < self.end_layer <= MAX_LAYERS
        ):
            raise ConfigError(
                f"start_layer {self.start_layer!r} and end_layer {self.end_layer!r} name no layers:"
                f" give whole numbers, 0 <= start_layer < end_layer <= {MAX_LAYERS}"
            )
        if not (_is_int(self.bins) and MIN_BINS <= self.bins <= MAX_BINS and self.bins % 2 == 0):
            raise ConfigError(
                f"bins {self.bins!r} cannot be used: give an even number, {MIN_BINS} to {MAX_BINS}"
            )


@dataclass(frozen=True)
class CacheGenConfig:
    """Bins of every layer of a model.

    Attributes:
        kspecs: Bins of the keys: runs of layers, each beginning where the previous one ends, the
            first at 0, the last ending at or after `nlayers`. Any sequence is accepted and stored
            as a tuple.
        vspecs: Bins of the values, in the same form.

    Raises:
        ConfigError: The specs leave a gap, overlap or end early, or `nlayers` is not 1 to 4096.
    """

    nlayers: int
    kspecs: Sequence[QuantizationSpec]
    vspecs: Sequence[QuantizationSpec]

    def __post_init__(self) -> None:
        if not (_is_int(self.nlayers) and 1 <= self.nlayers <= MAX_LAYERS):
            raise ConfigError(
                f"nlayers {self.nlayers!r} cannot be used: give a whole number, 1 to {MAX_LAYERS}"
            )
        object.__setattr__(self, "kspecs", tuple(self.kspecs))
        object.__setattr__(self, "vspecs", tuple(self.vspecs))
        _check_cover("kspecs", self.kspecs, self.nlayers)
        _check_cover("vspecs", self.vspecs, self.nlayers)

    @classmethod
    def from_model_name(cls, model_name: str) -> CacheGenConfig:
        """Return the configuration of a model: documented, or derived from its number of layers.
        Never refuses.

        Args:
            model_name: One of the documented names; or a directory whose `config.json` states the
                number of layers; or the last part of a documented name. For any other, 32 layers
                are assumed: further layers have the bins of the last one.
        """
        layers = (
            DOCUMENTED_LAYERS.get(model_name)
            or _layers_of_directory(model_name)
            or _layers_of_last_part(model_name)
        )
        return cls.for_num_layers(layers or DEFAULT_LAYERS)

    @classmethod
    def for_num_layers(cls, n: int) -> CacheGenConfig:
        """Return the documented rule for a model of `n` layers.

        With fewer than ten layers, 32 bins in all of them; else keys have 32 in layers 0 to 9,
        values in layers 0 and 1, and 16 after them.

        Raises:
            ConfigError: `n` is not 1 to 4096.
        """
        return cls(n, _derived_specs(n, FINE_KEY_LAYERS), _derived_specs(n, FINE_VALUE_LAYERS))

    def bins_of_keys(self, num_layers: int | None = None) -> tuple[int, ...]:
        """Return the bins of the keys of each layer.

        Args:
            num_layers: Number of layers to return; None: `nlayers`. Layers beyond `nlayers` have
                the bins of the last one.
        """
        return _bins_of(self.kspecs, self.nlayers, num_layers)

    def bins_of_values(self, num_layers: int | None = None) -> tuple[int, ...]:
        """Return the bins of the values of each layer; arguments as for `bins_of_keys`."""
        return _bins_of(self.vspecs, self.nlayers, num_layers)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_cover(name: str, specs: Sequence[QuantizationSpec], nlayers: int) -> None:
    end = 0
    for spec in specs:
        if spec.start_layer != end:
            raise ConfigError(
                f"{name}: {spec} begins at layer {spec.start_layer}: it must begin at {end}, where"
                " the one before it ends"
            )
        end = spec.end_layer
    if end < nlayers:
        raise ConfigError(
            f"{name} end at layer {end} of {nlayers}: add a spec for layers {end} to {nlayers}"
        )


def _derived_specs(num_layers: int, fine_layers: int) -> tuple[QuantizationSpec, ...]:
    if not (_is_int(num_layers) and 1 <= num_layers <= MAX_LAYERS):
        raise ConfigError(
            f"{num_layers!r} layers cannot be configured: give a whole number, 1 to {MAX_LAYERS}"
        )
    if num_layers < SHALLOW_LAYERS or num_layers <= fine_layers:
        return (QuantizationSpec(0, num_layers, FINE_BINS),)
    return QuantizationSpec(0, fine_layers, FINE_BINS), QuantizationSpec(
        fine_layers, num_layers, COARSE_BINS
    )


def _bins_of(
    specs: Sequence[QuantizationSpec], nlayers: int, num_layers: int | None
) -> tuple[int, ...]:
    bins = [
        spec.bins for spec in specs for _ in range(spec.start_layer, min(spec.end_layer, nlayers))
    ]
    wanted = nlayers if num_layers is None else num_layers
    return (*bins[:wanted], *[bins[-1]] * (wanted - nlayers))


def _layers_of_last_part(model_name: str) -> int | None:
    last = model_name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()
    return {
        name.rpartition("/")[2].lower(): layers for name, layers in DOCUMENTED_LAYERS.items()
    }.get(last)


def _layers_of_directory(model_name: str) -> int | None:
    """Return the number of layers in the `config.json` of a local model, including a multimodal
    model's text part; None if unknown.
    """
    if not model_name:
        return None
    path = Path(model_name) / "config.json"
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            text = file.read(MAX_MODEL_CONFIG_BYTES + 1)
        described = json.loads(text) if len(text) <= MAX_MODEL_CONFIG_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(described, dict):
        return None
    for part in (described, described.get("text_config")):
        if isinstance(part, dict):
            for field in _LAYER_FIELDS:
                if _is_int(part.get(field)) and 1 <= part[field] <= MAX_LAYERS:
                    return int(part[field])
    return None


def __getattr__(name: str) -> Any:
    return resolve(__name__, _RESOLVED_LATER, name)
