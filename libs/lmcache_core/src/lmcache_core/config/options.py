"""The facts about an option: type, unit, allowed values, meaning. Used by checks, the environment's
reader and the documentation.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
import os
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType
from typing import Any
from urllib.parse import quote, unquote_to_bytes, urlsplit

from lmcache_core.config.registry import FOREIGN_SCHEMES, REMOTE_SCHEMES

VERIFY_HOT_MODES = ("always", "sampled", "never")
DISK_SERDES = ("naive", "cachegen", "cachegen:high", "cachegen:low", "lossless")
"""Serdes available to a process without torch; "naive" means no encoding."""
REMOTE_SERDES = (*DISK_SERDES, "torch", "safetensor", "fast")
BLEND_POLICIES = ("deviation", "first_of_chunk")
SIDECAR_SETTING = "set the sidecar's "
MAX_SHOWN_CHARS = 200
MAX_SHOWN_ITEMS = 8
MAX_DECIMAL_BITS = 1 << 10
_METADATA_KEY = "option"
_DATABASE = re.compile(r"/?|/[0-9]{1,9}/?")
_SCHEME = re.compile(r"['\"]?\w[\w+.-]*://")
_NUMBERED_SCHEMES = ("redis", "rediss")
"""Schemes of Redis servers that have numbered databases."""
KIND_NAMES = MappingProxyType(
    {bool: "true or false", int: "whole number", float: "number", str: "text"}
)


@dataclass(frozen=True)
class Form:
    """A required form of a text.

    Attributes:
        wanted: Description of the form.
        advice: Returns what else helps with a text that does not have it, "" if nothing does.
    """

    fits: Callable[[str], bool]
    wanted: str
    advice: Callable[[str], str] = lambda _: ""


@dataclass(frozen=True)
class Option:
    """One option of the engine. The attributes after `beside_sidecar` are derived from the model's
    field.

    Attributes:
        group: Heading in the documentation.
        meaning: One or two sentences.
        unit: Unit of a number.
        limits: Least and greatest number.
        choices: The only values, if there are few.
        form: The form of a text; by default, not empty.
        secret: Never shown.
        beside_sidecar: What to do instead of setting it if a sidecar has the tiers; "" if it may be
            set there, too.
        name: Its name; `LMCACHE_<NAME>` in the environment.
        kind: bool, int, float or str.
        optional: Whether None is a value.
        default: Its value in `from_defaults`.
        documented: One of the documented fifteen; the others are this library's own.
    """

    group: str
    meaning: str
    unit: str = ""
    limits: tuple[float, float] = (0, 0)
    choices: tuple[Any, ...] = ()
    form: Form | None = None
    secret: bool = False
    beside_sidecar: str = ""
    name: str = ""
    kind: type = str
    optional: bool = False
    default: Any = None
    documented: bool = False

    @property
    def allowed(self) -> str:
        """Description of the allowed values."""
        if self.choices:
            text = ("" if len(self.choices) == 1 else "one of ") + ", ".join(
                _as_yaml(choice) for choice in self.choices
            )
        elif self.kind in (int, float):
            low, high = map(_as_yaml, self.limits)
            text = f"a {KIND_NAMES[self.kind]} in {low} … {high}"
        elif self.form is not None:
            text = self.form.wanted
        else:
            text = KIND_NAMES[self.kind]
        return f"{text}, or none" if self.optional else text

    def problem(self, value: Any) -> str | None:
        """Return why a value is invalid, without secrets; None if it is valid."""
        if self._holds(value):
            return None
        unit = f" ({self.unit})" if self.unit else ""
        near = nearest(value, self.choices)
        if self.form is not None and isinstance(value, str) and (advice := self.form.advice(value)):
            near = f"; {advice}"
        return f"{self.name}={self.shown(value)}: must be {self.allowed}{unit}{near}"

    def shown(self, value: Any) -> str:
        """Return a value for display: without secrets and credentials in a URL."""
        return "…" if self.secret and value != "" else shown(value)

    def _holds(self, value: Any) -> bool:
        if value is None:
            return self.optional
        kinds = (int, float) if self.kind is float else (self.kind,)
        if type(value) not in kinds:  # exactly: True is not a number
            return False
        if self.choices:
            return value in self.choices
        if self.kind in (int, float):
            low, high = self.limits
            return bool(low <= value <= high)  # also false for NaN
        return self.form is None or self.form.fits(value)


def option(
    group: str, meaning: str, *, default: Any = dataclasses.MISSING, sidecar: str = "", **facts: Any
) -> Any:
    """Return a dataclass field that is an option.

    Args:
        default: Omitted if `from_defaults` has it.
        sidecar: The sidecar's settings that replace it if a sidecar has the tiers.
        facts: Further attributes of `Option`.
    """
    if sidecar:
        facts["beside_sidecar"] = SIDECAR_SETTING + sidecar
    return dataclasses.field(
        default=default, metadata={_METADATA_KEY: Option(group, meaning, **facts)}
    )


def options_of(model: Any, documented_defaults: Callable[..., Any]) -> Mapping[str, Option]:
    """Return the options of a dataclass whose fields are all created by `option`, in their order.

    Args:
        model: The dataclass; a field with a default is one of this library's own.
        documented_defaults: The function whose parameters' defaults are those of the other fields.
    """
    hints = typing.get_type_hints(model)
    parameters = inspect.signature(documented_defaults).parameters
    found = {}
    for field in dataclasses.fields(model):
        kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
        documented = field.default is dataclasses.MISSING
        default = parameters[field.name].default if documented else field.default
        described = field.metadata[_METADATA_KEY]
        found[field.name] = dataclasses.replace(
            described,
            name=field.name,
            kind=kinds[0],
            form=described.form or (NON_EMPTY if kinds[0] is str else None),
            optional=NoneType in kinds,
            default=default,
            documented=documented,
        )
    return MappingProxyType(found)


def shown(value: Any) -> str:
    """Return a value for an error: bounded, without a URL's credentials and query, and for a
    mapping only the names.
    """
    text = _text(value, 2)
    quote = text[0] if text[:1] in ("'", '"') else ""
    before, at, after = text.rpartition("@")
    if at:
        scheme = _SCHEME.match(before)
        text = (scheme[0] if scheme else quote) + "…@" + after
    if "?" in text and ("://" in text or "=" in text.partition("?")[2]):
        text = text.partition("?")[0] + "?…" + quote
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


def _text(value: Any, depth: int) -> str:
    """Return a value without the values of mappings. Aliases in YAML can make it endless, and
    Python refuses to print the decimals of a very large integer.
    """
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        open_, close = "{}" if isinstance(value, (Mapping, set, frozenset)) else "[]"
        names_only = isinstance(value, Mapping)
        first = itertools.islice(value, MAX_SHOWN_ITEMS if depth else 0)
        items = [
            each if names_only and isinstance(each, str) else _text(each, depth - 1)
            for each in first
        ]
        items += ["…"] if len(value) > len(items) else []
        return f"{open_}{', '.join(items)}{close}"
    if isinstance(value, int) and value.bit_length() > MAX_DECIMAL_BITS:
        return f"{value:#x}"
    return repr(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the nearest one, or all."""
    names = list(known)
    return nearest(name, names) or f"; known: {', '.join(names)}"


def nearest(value: Any, known: Iterable[Any]) -> str:
    """Return the text of `did_you_mean` if a known value is near; else ""."""
    near = (
        difflib.get_close_matches(value, [name for name in known if isinstance(name, str)], n=1)
        if isinstance(value, str)
        else []
    )
    return f"; did you mean {near[0]!r}?" if near else ""


def is_remote_url(text: str) -> bool:
    """Return whether a text is a URL with one of `REMOTE_SCHEMES` that names a host, or hosts, and
    no invalid port (for `file`: a path).
    """
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    if parts.scheme == "file":
        return is_directory_url(text)
    if parts.scheme in _NUMBERED_SCHEMES and not is_database(parts.path):
        return False
    return parts.scheme in REMOTE_SCHEMES and all(
        map(_is_host, parts.netloc.rpartition("@")[2].split(","))
    )


def is_database(path: str) -> bool:
    """Return whether the path of a Redis URL names a database: a number, or nothing. redis-py takes
    anything else for 0.
    """
    return _DATABASE.fullmatch(path) is not None


def _remote_url_advice(text: str) -> str:
    """Return what helps with a refused URL: the rule of a known scheme that it violates, or what
    stands for a foreign one.
    """
    scheme = text.partition(":")[0]
    if scheme == "file":
        return DIRECTORY_RULE
    if scheme in _NUMBERED_SCHEMES:
        return DATABASE_RULE
    return FOREIGN_SCHEMES.get(scheme.lower(), "")


def _is_host(text: str) -> bool:
    """Return whether a text is a host, or host:port."""
    try:
        parts = urlsplit(f"//{text}")
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def problems_of(values: Mapping[str, Any], options: Mapping[str, Option]) -> list[str]:
    """Return a sentence for each of these values that is invalid."""
    problems = (options[name].problem(value) for name, value in values.items())
    return [problem for problem in problems if problem is not None]


def as_directory_url(value: Any) -> Any:
    """Return a plain absolute path, which LMCache also accepts, in our form; lists with commas are
    left unchanged, and refused.
    """
    if not (
        isinstance(value, str)
        and value.startswith("/")
        and "," not in value
        and _is_file_name(value)
    ):
        return value
    return f"file://{quote(os.fsencode(value))}"


def directory_of_url(url: str) -> str:
    """Return the path in a `file:` URL. A name that is not UTF-8 has surrogates, as everywhere in
    Python.
    """
    return os.fsdecode(unquote_to_bytes(os.fsencode(urlsplit(url).path)))


def _is_file_name(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def is_directory_url(text: str) -> bool:
    """Return whether a text is `file:///dir/`, one directory below the root."""
    path = text.removeprefix("file://")
    if path == text or not _is_file_name(path):
        return False
    return path.startswith("/") and path.strip("/") != "" and not set(path) & set("?#,")


def _as_yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:_}".replace("_", " ") if isinstance(value, (int, float)) else str(value)


DATABASE_RULE = "after host:port may come / and the number of a database"
DIRECTORY_RULE = (
    "write file:// and the absolute path of a directory, with ?, # and comma as %3F, %23, %2C"
)
REMOTE_URL = Form(
    is_remote_url,
    f"a URL with one of the schemes {', '.join(REMOTE_SCHEMES)}, and a port in 1 … 65535 if any",
    _remote_url_advice,
)
DIRECTORY_URL = Form(
    is_directory_url,
    "a directory as /dir/ or file:///dir/ (there with ?, # and comma written as %3F, %23, %2C)",
)
MAX_SOCKET_PATH_BYTES = 107
"""Limit of Linux for the path of a Unix socket."""
SOCKET_PATH = Form(
    lambda text: (
        text.startswith("/")
        and "\0" not in text
        and len(text.encode("utf-8", "replace")) <= MAX_SOCKET_PATH_BYTES
    ),
    f"an absolute path of at most {MAX_SOCKET_PATH_BYTES} bytes, without a scheme",
)
UTF8 = Form(lambda text: not any("\ud800" <= char <= "\udfff" for char in text), "text in UTF-8")
NON_EMPTY = Form(lambda text: text.strip() != "", "text")
