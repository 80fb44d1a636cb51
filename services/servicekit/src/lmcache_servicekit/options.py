"""The options of a service in words, for `--help` and docs/configuration.md, from the fields of its
settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml
from pydantic import BaseModel

_NONE: Final = re.compile(r"(?<!\. )\bNone\b")
_UNITS: Final = {"_per_s": "", "_gb": " GB", "_mb": " MB", "_ms": " ms", "_s": " s"}


@dataclass(frozen=True, slots=True)
class OptionText:
    """One option, for people.

    Attributes:
        name: Its name; of a part of it, with a dot: `quota.max_bytes`, `peers.*.id`.
        default: In YAML, or in words; empty if the option is required.
        values: Its choices or bounds, with their unit; empty if any value is accepted.
        owner: The settings that declare it.
    """

    name: str
    default: str
    values: str
    meaning: str
    owner: type

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return not self.default


def options_of(model: type[BaseModel]) -> Iterator[OptionText]:
    """Yield the options of settings, those of a nested model after the option that holds it."""
    schema = model.model_json_schema()
    yield from _options(model, schema, schema.get("$defs", {}))


def _options(
    model: type[BaseModel], schema: Mapping[str, Any], defs: Mapping[str, Any], above: str = ""
) -> Iterator[OptionText]:
    for name, field in model.model_fields.items():
        kinds = [
            defs[kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind
            for kind in (schema["properties"][name].get("anyOf") or [schema["properties"][name]])
        ]
        meaning, owner = _meaning(model, name)
        default = "" if field.is_required() else _default(schema["properties"][name])
        values = next(filter(None, (_values(kind, name) for kind in kinds)), "")
        yield OptionText(f"{above}{name}", default, values, _NONE.sub("none", meaning), owner)
        for nested, between in _nested(field.annotation):
            inner = defs[nested.__name__]
            yield from _options(nested, inner, defs, f"{above}{name}{between}.")


def _meaning(model: type[BaseModel], name: str) -> tuple[str, type]:
    """Return what an option is for, and the settings that say so: those that only change its
    default do not repeat it.
    """
    told = [
        (" ".join((owner.model_fields[name].description or "").split()), owner)
        for owner in model.__mro__
        if issubclass(owner, BaseModel) and name in owner.model_fields
    ]
    meaning = next(filter(None, (text for text, _ in told)), "")
    return meaning, [owner for text, owner in told if text == meaning][-1]


def _nested(annotation: Any, between: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the models in an annotation, each with the text between the option's name and the names
    of the model's options.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, between
    for inner in getattr(annotation, "__args__", ()):
        is_many = getattr(annotation, "__origin__", None) in (dict, list)
        yield from _nested(inner, ".*" if is_many else between)


def _default(schema: Mapping[str, Any]) -> str:
    default = schema.get("default", {})  # from a factory, which the schema does not know
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if default in ("", [], {}):
        return "empty"
    return _flow(default) if isinstance(default, dict | list) else str(default)


def _flow(value: Any) -> str:
    """Return a value as YAML on one line, without members that are None."""
    text: str = yaml.safe_dump(_set(value), default_flow_style=True, sort_keys=False, width=1 << 20)
    return text.strip()


def _set(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _set(one) for name, one in value.items() if one is not None}
    return [_set(one) for one in value] if isinstance(value, list) else value


def _values(schema: Mapping[str, Any], name: str) -> str:
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if schema.get("type") not in ("integer", "number"):
        return ""
    unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
    low, high = schema.get("minimum"), schema.get("maximum")
    if (above := schema.get("exclusiveMinimum")) is not None:
        return f">{above:.12g}…{'' if high is None else f'{high:.12g}'}{unit}"
    if high is None:
        return unit.strip() if low is None else f"≥{low:.12g}{unit}"
    return f"{low:.12g}…{high:.12g}{unit}"
