"""The settings that all services share, and how settings are loaded: one YAML file, overridden by
environment variables. A misspelt name is refused.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, Union, get_args, get_origin
from urllib.parse import urlsplit

import yaml
from lmcache_core.addresses import is_loopback, parse_address
from lmcache_core.config.engine_config import OPTIONS
from lmcache_core.errors import ConfigError
from lmcache_core.security import validate_instance_id
from lmcache_core.strict_yaml import DuplicateNameError, load_yaml
from lmcache_core.telemetry.tracing import DEFAULT_SAMPLE_RATIO
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretBytes,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

FieldPath = tuple[str, ...]
Port = Annotated[int, Field(ge=0, le=65535)]
S = TypeVar("S", bound="ServiceSettings")

MAX_CONFIG_FILE_BYTES: Final = 1 << 20
MAX_SHOWN_CHARS: Final = 120
MAX_RATE_PER_S: Final = 1e9
CONFIG_NAME: Final = "CONFIG"

_CONSEQUENCE: Final = "default_factory_not_called"
"""What pydantic says of a default that follows from other options, when one of those is wrong:
that one is reported.
"""
NESTING: Final = "__"
MASK: Final = "**********"

URL_PATTERN: Final = r"^https?://[^@\s]+$"
_PATTERNS_IN_WORDS: Final = {
    URL_PATTERN: "must be http://host:port or https://host:port",
    r"^[0-9a-f]{64}$": "must be 64 hex digits, as of a chunk hash",
}

_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASS|KEY|CREDENTIAL", re.IGNORECASE)
_URL_WITH_PASSWORD = re.compile(r"://[^/\s]*@")
# What Kubernetes adds for a service `lmcache-lookup`, or one whose name begins so:
# LMCACHE_LOOKUP_SERVICE_HOST, LMCACHE_LOOKUP_PORT=tcp://... Names of ports have at most 63
# characters: bounded, the pattern is linear in the length of a name.
_LINK_NAME = re.compile(
    r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_\w{1,63})?|PORT_\d{1,5}_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK_PORT_VALUE = re.compile(r"(tcp|udp|sctp)://\S+")


class ServiceSettings(BaseModel):
    """Base of a service's settings. A subclass sets `about` (what the service is, in a sentence),
    `env_prefix` and a default for `port`, and adds its own fields.

    An instance made directly holds exactly the given values and defaults; only `load_settings`
    looks at files and environment.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )
    about: ClassVar[str] = ""
    env_prefix: ClassVar[str]

    host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    """Address to listen on; other pods reach no loopback address."""
    port: Port
    """REST."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """`text` for people, `json` for log collectors."""
    auth_tokens_file: Path | None = None
    """YAML file of bearer tokens. Without it every caller is an admin of the tenant `default`."""
    allow_anonymous: bool = False
    """Allow other machines without tokens."""
    tls_cert_file: Path | None = None
    """Certificate chain (PEM). With it every port that takes tokens is encrypted. This file and the
    next two are read again when they change.
    """
    tls_key_file: Path | None = None
    """Its key (PEM, no passphrase), if not in the same file."""
    tls_client_ca_file: Path | None = None
    """Authorities (PEM) for certificates of callers; None: callers show none."""
    allow_plaintext: bool = False
    """Allow other machines to show tokens unencrypted."""
    rate_limit_per_tenant: float | None = Field(default=None, gt=0, le=MAX_RATE_PER_S)
    """Requests of one tenant per second, in each process; None: no limit."""
    instance_id: Annotated[str, AfterValidator(validate_instance_id)] = Field(
        default_factory=socket.gethostname, json_schema_extra={"default": "the host name"}
    )
    """Name of this process; unique at lookup and broker."""
    shutdown_grace_s: int = Field(default=20, ge=0, le=3600)
    """How long requests in flight may take after SIGTERM."""
    health_host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    """Address of an unencrypted listener for `/healthz`, `/readyz` and `/metrics` alone."""
    health_port: Port | None = None
    """Its port; None: no such listener."""
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=URL_PATTERN,
        max_length=300,
        description=OPTIONS["otlp_endpoint"].meaning,
    )
    trace_sample_ratio: float = Field(
        default=DEFAULT_SAMPLE_RATIO,
        ge=0,
        le=1,
        description=OPTIONS["trace_sample_ratio"].meaning,
    )

    @field_validator("*")
    @classmethod
    def _check_paths(cls, value: object) -> object:
        if isinstance(value, Path) and "\0" in str(value):
            raise ValueError("contains a NUL character; no path can")
        if value == Path():
            raise ValueError("names no file or directory; leave it out, or give a path")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_collector(cls, value: str | None) -> str | None:
        if value is not None:
            urlsplit(value).port  # noqa: B018 -- out of range is an error
        return value

    @model_validator(mode="after")
    def _refuse_open_door(self) -> ServiceSettings:
        if (
            self.auth_tokens_file is None
            and not self.allow_anonymous
            and not is_loopback(self.host)
        ):
            raise ValueError(
                f"host={self.host!r} is reachable from other machines, but auth_tokens_file is not"
                " set: set it, or set allow_anonymous=true if a NetworkPolicy is all the"
                " protection you want"
            )
        self.refuse_plaintext("host", self.host)
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> ServiceSettings:
        if self.tls_cert_file is None and (self.tls_key_file or self.tls_client_ca_file):
            raise ValueError(
                "tls_key_file or tls_client_ca_file is set, but tls_cert_file is not: set it, or"
                " leave them out"
            )
        return self

    @model_validator(mode="after")
    def _refuse_shared_ports(self) -> ServiceSettings:
        taken: dict[str, tuple[str, int]] = {}
        for option, (host, port) in self.listeners().items():
            for other, (other_host, other_port) in taken.items():
                if port and port == other_port and _overlap(host, other_host):
                    raise ValueError(
                        f"{option}={port} is the value of {other} too: give each a port of its own"
                    )
            taken[option] = (host, port)
        return self

    @property
    def only_tenant(self) -> str | None:
        """Whose service this is; None: all tenants'. Callers of other tenants are let in only
        with the role `admin`.
        """
        return None

    def listeners(self) -> dict[str, tuple[str, int]]:
        """Return host and port of every listener, by the name of the port's option."""
        return {"port": (self.host, self.port)} | self._optional(
            "health_port", self.health_host, self.health_port
        )

    def _optional(self, option: str, host: str, port: int | None) -> dict[str, tuple[str, int]]:
        return {} if port is None else {option: (host, port)}

    def refuse_plaintext(self, option: str, host: str) -> None:
        """Check an address to which callers send tokens.

        Args:
            option: Name of the address's option.

        Raises:
            ValueError: Tokens would cross the network in plain text.
        """
        is_told_so = self.allow_plaintext or (
            self.allow_anonymous and self.auth_tokens_file is None
        )
        if self.tls_cert_file is None and not is_told_so and not is_loopback(host):
            raise ValueError(
                f"{option}={host!r} is reachable from other machines, but tls_cert_file is not set,"
                " so that tokens and chunks could be read on their way: set it, or set"
                " allow_plaintext=true if the network is trusted or encrypts by itself"
            )


def _overlap(host: str, other: str) -> bool:
    """Return whether two listeners on one port conflict at these hosts."""
    if host == other or is_unspecified(host) or is_unspecified(other):
        return True
    return is_loopback(host) and is_loopback(other) and "localhost" in (host, other)


def is_unspecified(host: str) -> bool:
    """Return whether a listener at `host` takes every address of this machine."""
    address = parse_address(host)
    return host == "" if address is None else address.is_unspecified


def load_settings(
    settings_cls: type[S], config_file: Path | None = None, environ: Mapping[str, str] | None = None
) -> S:
    """Read the settings file, override it with environment variables, and validate the result.

    Args:
        settings_cls: The service's settings; its `env_prefix` names its variables.
        config_file: YAML file; None takes the one that the variable `<prefix>CONFIG` names, if any.
        environ: Instead of the process's environment.

    Raises:
        ConfigError: A name is unknown or a value is impossible. The text has one line for each,
            with name, value and fix.
    """
    source = os.environ if environ is None else environ
    named = source.get(f"{settings_cls.env_prefix}{CONFIG_NAME}")
    path = config_file if config_file is not None else Path(named) if named else None
    values = {} if path is None else _read_file(path)
    origins: dict[FieldPath, str] = {}
    for name, field, value in _read_variables(settings_cls, source):
        origins[field] = name
        for part in reversed(field):
            value = {part: value}
        values = _merge(values, value)
    try:
        return settings_cls(**values)
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
        lines = [
            _explain(settings_cls, error, origins, path)
            for error in errors
            if error["type"] != _CONSEQUENCE
        ]
        raise ConfigError("\n".join(lines)) from None


def render_settings(settings: ServiceSettings) -> str:
    """Return the effective settings as YAML that `load_settings` reads again, secrets masked."""
    text: str = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)
    return text


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_FILE_BYTES + 1)
    except OSError as exc:
        raise ConfigError(
            f"config file {path}: {exc.strerror or exc}; create it or correct the path"
        ) from exc
    if len(data) > MAX_CONFIG_FILE_BYTES:
        raise ConfigError(
            f"config file {path}: larger than {MAX_CONFIG_FILE_BYTES} bytes; it is not a settings"
            " file"
        )
    try:
        raw = load_yaml(data)
    except DuplicateNameError as exc:
        raise ConfigError(
            f"config file {path}: line {exc.line}: the name {exc.name!r} is there twice; keep one"
            " of them"
        ) from None
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark is not None else 1
        raise ConfigError(f"config file {path}: line {line} is not YAML; correct it") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"config file {path}: not YAML; correct it") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict) or not all(isinstance(name, str) for name in raw):
        raise ConfigError(f"config file {path}: write one `name: value` a line")
    return raw


def _without_credentials(text: str) -> str:
    """Mask what may be a password in a URL, even one with a slash in it."""
    before, _, after = text.partition("://")
    return f"{before}://{MASK}@{after.rpartition('@')[2]}" if "@" in after else text


def _nearest(name: str, settings_cls: type[ServiceSettings]) -> str:
    known = list(settings_cls.model_fields)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def in_words(error: ErrorDetails) -> str:
    """Return the rule that a value breaks; pydantic's sentence in our words."""
    if error["type"] == "string_pattern_mismatch" and (
        rule := _PATTERNS_IN_WORDS.get(error["ctx"]["pattern"])
    ):
        return rule
    if error["type"] in ("float_parsing", "float_type"):
        is_size = error["loc"] and str(error["loc"][-1]).endswith("_gb")
        return f"must be a number{' of GB (2^30 bytes), such as 8' if is_size else ''}"
    message = error["msg"].removeprefix("Value error, ").partition(", unable to ")[0]
    message = message.replace("a valid boolean", "true or false")
    return message.replace("Input should be ", "must be ", 1)


def _explain(
    settings_cls: type[ServiceSettings],
    error: ErrorDetails,
    origins: Mapping[FieldPath, str],
    path: Path | None,
) -> str:
    message = in_words(error)
    location = tuple(str(part) for part in error["loc"])
    if not location:
        return message
    origin = next((name for at, name in origins.items() if location[: len(at)] == at), None)
    source = origin or (str(path) if path is not None else "no file and no variable sets it")
    if error["type"] == "extra_forbidden" and len(location) == 1:
        return f"{location[0]}: unknown option in {path}; {_nearest(location[0], settings_cls)}"
    if error["type"] == "missing":
        return f"{'.'.join(location)}: required; set it in the config file or the environment"
    field = settings_cls.model_fields.get(location[0])
    shown = (
        MASK
        if field is None or _is_secret(field.annotation)
        else _without_credentials(repr(error["input"]))[:MAX_SHOWN_CHARS]
    )
    option = f"{'.'.join(location)}={shown}"
    # The core's own checks name option and value too.
    return f"{option} ({source}): {message.removeprefix(f'{option}: ').removeprefix('its URL: ')}"


def _read_variables(
    settings_cls: type[ServiceSettings], environ: Mapping[str, str]
) -> Iterator[tuple[str, FieldPath, Any]]:
    """Yield each variable that sets something, the path of its field, and its value.

    A field `quota.max_bytes` is the variable `<prefix>QUOTA__MAX_BYTES`. Scalars are taken as text,
    everything else is read as YAML (of which JSON is a subset). An empty value counts as unset.
    Variables that Kubernetes adds for services are ignored.

    Raises:
        ConfigError: A variable with our prefix sets nothing, or its text is not YAML where it has
            to be.
    """
    prefix = settings_cls.env_prefix
    fields = {
        f"{prefix}{NESTING.join(path).upper()}": (path, annotation)
        for path, annotation in _fields(settings_cls)
    }
    # Sorted, so that a whole model comes before its single fields, which then override it.
    for name, text in sorted(environ.items()):
        short = name.removeprefix(prefix)
        if (
            not name.upper().startswith(prefix)
            or text == ""
            or short == CONFIG_NAME
            or _is_service_link(short, text)
        ):
            continue
        if name not in fields:
            raise ConfigError(_unknown_variable(name, text, fields))
        path, annotation = fields[name]
        yield name, path, text if _is_scalar(annotation) else _parse_yaml(name, text)


def _unknown_variable(name: str, text: str, fields: Mapping[str, tuple[FieldPath, Any]]) -> str:
    near = difflib.get_close_matches(name.upper(), sorted(fields), n=1)
    is_hidden = (
        _SECRET_NAME.search(name)
        or _URL_WITH_PASSWORD.search(text)
        or (near and _is_secret(fields[near[0]][1]))
    )
    fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(fields))}"
    return f"{name}={MASK if is_hidden else text!r} sets nothing; {fix}"


def _is_secret(annotation: Any) -> bool:
    return any(alternative in (SecretStr, SecretBytes) for alternative in _alternatives(annotation))


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base`, overridden by the leaves of `over`; neither is changed."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        result[name] = (
            _merge(below, value)
            if isinstance(below, Mapping) and isinstance(value, Mapping)
            else value
        )
    return result


def _is_service_link(name: str, text: str) -> bool:
    is_address = f"_{name}".endswith("_PORT") and _LINK_PORT_VALUE.fullmatch(text) is not None
    return is_address or _LINK_NAME.fullmatch(name) is not None


def _fields(model: type[BaseModel], above: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    for name, info in model.model_fields.items():
        path = (*above, name)
        yield path, info.annotation
        for alternative in _alternatives(info.annotation):
            if isinstance(alternative, type) and issubclass(alternative, BaseModel):
                yield from _fields(alternative, path)


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, without `Annotated` wrappers; anything else unchanged."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin is Union or origin is types.UnionType:
        for member in get_args(annotation):
            yield from _alternatives(member)
    else:
        yield annotation


def _is_scalar(annotation: Any) -> bool:
    return not any(
        get_origin(alternative) in (list, tuple, dict, set, frozenset)
        or alternative in (list, tuple, dict, set, frozenset)
        or (isinstance(alternative, type) and issubclass(alternative, BaseModel))
        for alternative in _alternatives(annotation)
    )


def _parse_yaml(name: str, text: str) -> Any:
    try:
        return load_yaml(text)
    except DuplicateNameError as exc:
        raise ConfigError(
            f"{name}: the name {exc.name!r} is there twice; keep one of them"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(
            f"{name}: its text is not YAML; write for example [a, b] or {{name: value}}"
        ) from None


def read_secret_file(path: Path | None, option: str) -> str | None:
    """Return the text of a file that holds one secret, without surrounding white space.

    Args:
        option: Name of the option, for the error.

    Raises:
        ConfigError: The file cannot be read or is empty.
    """
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"{option}={path} cannot be read: {reason}; correct the path") from exc
    if not text:
        raise ConfigError(f"{option}={path} is empty; write the secret into it")
    return text
