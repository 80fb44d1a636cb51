"""What the profiles of the CacheGen codec mean."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from lmcache_core.serde.blob import Mode
from lmcache_core.serde.cachegen import CacheGenConfig
from lmcache_core.serde.quantised.coder import Quantiser

SHORT_TOKENS = 64
"""Below, a channel has too few values to measure its spread: the profiles of our own quantise as
the documented one there.
"""
PLANE_LEVELS = 127


class Profile(StrEnum):
    """How much is kept.

    `STANDARD`: the documented bins, the same values as the documented algorithm. `HIGH` and `LOW`:
        one step for each layer of keys or
    values, 9/16 or 15/16 of the standard deviation within its channels (docs/codec.md has the curve
    that they were chosen from).
    """

    STANDARD = "standard"
    HIGH = "high"
    LOW = "low"


_FINENESS = {Profile.HIGH: 144, Profile.LOW: 240}


def quantiser_of(profile: Profile, shape: Sequence[int]) -> Quantiser:
    """How a tensor `[sides, layers, tokens, channels]` is quantised: keys first, then values;
    where there is one side, it is as keys.
    """
    sides, layers, tokens, _ = shape
    if profile is Profile.STANDARD or tokens < SHORT_TOKENS:
        config = CacheGenConfig.for_num_layers(layers)
        bins = (
            [*config.bins_of_keys(), *config.bins_of_values()]
            if sides == 2
            else list(config.bins_of_keys()) * sides
        )
        return Quantiser(Mode.BY_TOKEN, tuple(count // 2 - 1 for count in bins))
    return Quantiser(Mode.BY_PLANE, (PLANE_LEVELS,) * (sides * layers), _FINENESS[profile])


def error_groups(profile: Profile, shape: Sequence[int]) -> list[tuple[str, slice]]:
    """Groups of planes whose errors are told together: layers of keys, and of values, that are
    quantised alike.
    """
    sides, layers, _, _ = shape
    levels = quantiser_of(profile, shape).levels
    names = ("keys", "values") if sides == 2 else ("kv", *(f"kv{side}" for side in range(1, sides)))
    groups = []
    for side in range(sides):
        start = 0
        for layer in range(1, layers + 1):
            at = side * layers
            if layer == layers or levels[at + layer] != levels[at + start]:
                groups.append((f"{names[side]} {start}-{layer - 1}", slice(at + start, at + layer)))
                start = layer
    return groups
