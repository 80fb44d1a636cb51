"""Errors of a group of layers, as commands print them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from lmcache_core.serde.codec import GroupError


class LayerErrors(msgspec.Struct, frozen=True):
    """How far decoded values of a group of layers are from what was stored, as their encoder
    measured it.

    Attributes:
        layers: The group, for example `keys 0-9`.
        max_relative: Largest error, relative to the largest value of its token or channel.
        rms_relative: Root of the mean square error, relative to the root of the mean square value,
            each in parts of its scale: the largest value of its token or channel.
    """

    layers: str
    max_relative: float
    rms_relative: float


def worst_by_layers(groups: Iterable[GroupError]) -> list[LayerErrors]:
    """The largest errors of each group, of all reports that `groups` come from."""
    worst: dict[str, LayerErrors] = {}
    for group in groups:
        seen = worst.get(group.name)
        largest = group.max_relative if seen is None else max(seen.max_relative, group.max_relative)
        rms = group.rms_relative if seen is None else max(seen.rms_relative, group.rms_relative)
        worst[group.name] = LayerErrors(group.name, largest, rms)
    return list(worst.values())
