"""Check each settings file with the settings model of its service."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lmcache_core.errors import ConfigError, LMCacheError

from lmcache_ctl.doctor.findings import Finding, Level, Subject
from lmcache_ctl.errors import UsageError
from lmcache_ctl.options import process_variable

if TYPE_CHECKING:
    from lmcache_core.config import LMCacheEngineConfig
    from lmcache_servicekit.settings import ServiceSettings

CHECK: Final = "configuration"
ENGINE: Final = "engine"
MODELS: Final = {
    "lookup": ("lmcache_lookup.settings", "LookupSettings", "lookup"),
    "broker": ("lmcache_broker.settings", "BrokerSettings", "p2p_broker"),
    "storage": ("lmcache_storage.settings", "StorageSettings", "cache_storage"),
    "sidecar": ("lmcache_sidecar.settings", "SidecarSettings", "sidecar"),
    "webhook": ("lmcache_webhook.settings", "WebhookSettings", "webhook"),
}
"""Module and name of each service's model, and the directory of `services/` that its package is
in.
"""
NODES: Final = ("sidecar", "storage")
"""Services that need `lmcache-node` too."""
SECRET_FILE: Final = re.compile(r"(key|keys|password|salt|token|tokens)_file")
"""What the name of an option ends with whose file only its owner may read."""
SERVER_IDENTITIES: Final = (
    ("tls_cert_file", "tls_key_file", "tls_client_ca_file"),
    ("peer_tls_cert_file", "peer_tls_key_file", "peer_tls_client_ca_file"),
)
TRUSTED_BY_PEERS: Final = {
    "tls_cert_file": "tls_ca_file",
    "peer_tls_cert_file": "peer_tls_ca_file",
}
"""By the option of a certificate, that of the authorities that peers with like settings trust."""
CLIENT_IDENTITIES: Final = (
    ("tls_client_cert_file", "tls_client_key_file", "tls_ca_file"),
    ("redis_tls_cert_file", "redis_tls_key_file", "redis_tls_ca_file"),
    ("remote_tls_cert_file", "remote_tls_key_file", "remote_tls_ca_file"),
    ("peer_tls_cert_file", "peer_tls_key_file", "peer_tls_ca_file"),
)
"""Options that name a certificate, its key, and the authorities that go with them; those with
`peer` and `remote` are an engine's.
"""


ALLOCATOR: Final = "PYTORCH_CUDA_ALLOC_CONF"
ALLOCATOR_FIX: Final = "leave expandable_segments:True out of it"


def allocator_problem(conf: str) -> str:
    """Return why vLLM refuses this `PYTORCH_CUDA_ALLOC_CONF`, or ""."""
    if "expandable_segments:True" not in conf:
        return ""
    return f"{ALLOCATOR}={conf}: vLLM refuses every KV connector with expandable_segments"


class ConfigFile(NamedTuple):
    """A parsed `KIND=FILE`."""

    kind: str
    path: Path


class Loaded(NamedTuple):
    """A valid settings file."""

    file: ConfigFile
    settings: ServiceSettings | LMCacheEngineConfig


def parse_config_file(text: str) -> ConfigFile:
    """Read `KIND=FILE`.

    Raises:
        UsageError: The text is not `KIND=FILE`, or the kind is unknown.
    """
    kind, separator, path = text.partition("=")
    if not separator or not path or kind not in (*MODELS, ENGINE):
        raise UsageError(f"{text!r}: write KIND=FILE, KIND one of {', '.join((*MODELS, ENGINE))}")
    return ConfigFile(kind, Path(path))


def check_files(files: Sequence[ConfigFile]) -> tuple[list[Finding], list[Loaded]]:
    """Return the findings, and the valid files.

    Environment variables count as they do for the service.
    """
    findings: list[Finding] = []
    loaded: list[Loaded] = []
    for file in files:
        where = f"{file.kind} {file.path}"
        subject = Subject(CHECK, where)
        try:
            settings = _load(file)
        except ModuleNotFoundError as exc:
            node = "./services/node " if file.kind in NODES else ""
            folder = MODELS[file.kind][2]
            packages = f"./libs/lmcache_core ./services/servicekit {node}./services/{folder}"
            fix = f"install it from a checkout (pip install {packages}), or check it in its image"
            findings.append(subject.warning(f"not checked: {exc.name} is not installed here", fix))
            continue
        except LMCacheError as exc:
            fix = "correct it; the service ends with code 2 on it"
            if file.kind == ENGINE:
                fix = "correct it; the engine does not start on it"
            findings += [subject.error(line, fix) for line in str(exc).splitlines()]
            continue
        loaded.append(Loaded(file, settings))
        findings.append(subject.ok("is read by its service"))
        findings += _files_of(Subject("files", where), settings)
        if file.kind == ENGINE and (problem := allocator_problem(process_variable(ALLOCATOR))):
            findings.append(Subject(CHECK, where).error(problem, ALLOCATOR_FIX))
        if file.kind != ENGINE:
            findings += _protection_of(Subject("security", where), settings)
        findings += _certificates_of(where, settings)
    return findings, loaded


def _load(file: ConfigFile) -> Any:
    if file.kind == ENGINE:
        from lmcache_core.config import LMCacheEngineConfig

        return LMCacheEngineConfig.from_file(str(file.path))
    from lmcache_servicekit.settings import load_settings

    module, name, _ = MODELS[file.kind]
    model: type[ServiceSettings] = getattr(importlib.import_module(module), name)
    return load_settings(model, file.path)


def _certificates_of(where: str, settings: Any) -> Iterator[Finding]:
    """Create the TLS contexts that the service creates at start; missing files were already
    reported.
    """
    from lmcache_core.security import TlsFiles, client_context, server_context

    from lmcache_ctl.doctor.certificates import check_chain, check_identity

    seen: set[tuple[Path, ...]] = set()
    loaded: set[str] = set()
    for context, identities in (
        (server_context, SERVER_IDENTITIES),
        (client_context, CLIENT_IDENTITIES),
    ):
        for names in identities:
            values = (getattr(settings, name, None) for name in names)
            cert, key, ca = (None if value is None else Path(value) for value in values)
            files = TlsFiles(cert, key, ca, names)
            is_told = tuple(files.paths[:2]) in seen
            if files.cert_file is None or is_told or not all(map(_exists, files.paths)):
                continue
            seen.add(tuple(files.paths[:2]))
            loaded.add(names[2])
            load = functools.partial(context, files)
            found = check_identity(where, names[0], files.cert_file, load)
            yield found
            authorities = getattr(settings, TRUSTED_BY_PEERS.get(names[0], ""), None)
            if authorities is not None and found.level is not Level.ERROR:
                chain = TlsFiles(files.cert_file, files.key_file, Path(authorities))
                yield from check_chain(where, names[0], chain)

    for option, path in _paths_of(settings, "ca_file"):
        if option in loaded or not _exists(path):
            continue
        try:
            client_context(TlsFiles(ca_file=path, options=("", "", option)))
        except LMCacheError as exc:
            yield Subject("certificate", where).error(str(exc), "mount the authorities")


def _paths_of(settings: Any, ending: str) -> Iterator[tuple[str, Path]]:
    """Yield the options of a service or an engine with that ending that name a file, and it."""
    fields = getattr(type(settings), "model_fields", None)
    names = fields if fields is not None else [one.name for one in dataclasses.fields(settings)]
    for option in sorted(name for name in names if name.endswith(ending)):
        value = getattr(settings, option)
        if value is not None:
            yield option, Path(value)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # `_files_of` tells which
        return False


def _files_of(subject: Subject, settings: Any) -> Iterator[Finding]:
    """Check that each file is readable and valid, and that secrets are not world-readable."""
    for option, path in _paths_of(settings, "_file"):
        if option.startswith("peer_") and not settings.enable_p2p:
            continue
        try:
            _read_as_the_service(option, path)
            mode = stat.S_IMODE(path.stat().st_mode)
        except (OSError, LMCacheError, ValueError) as exc:
            reason = getattr(exc, "strerror", None) or exc
            fix = "mount or write it where the settings say"
            yield subject.error(
                str(exc) if f"{option}=" in str(exc) else f"{option}={path}: {reason}", fix
            )
            continue
        if SECRET_FILE.search(option) and mode & stat.S_IROTH:
            what = f"{option} {path} is world-readable ({mode:04o})"
            yield subject.warning(what, f"chmod o-r {path}")
        else:
            yield subject.ok(f"{option} {path}")


def _protection_of(subject: Subject, settings: ServiceSettings) -> Iterator[Finding]:
    if settings.auth_tokens_file is None and settings.allow_anonymous:
        what = "every client that reaches it may call it (allow_anonymous)"
        fix = "set auth_tokens_file, unless a NetworkPolicy is protection enough"
        yield subject.warning(what, fix)
    if settings.allow_plaintext and settings.tls_cert_file is None:
        what = "tokens and chunks cross the network unencrypted (allow_plaintext)"
        yield subject.note(what, "set tls_cert_file, unless the network encrypts by itself")


def _read_as_the_service(option: str, path: Path) -> None:
    """Read a file; raise what the service would."""
    from lmcache_core.security import TicketKeyFile, TokenFile, TokenTable

    if option == "auth_tokens_file":
        TokenTable.from_file(path, option)
    elif option.endswith("token_file"):
        TokenFile(path, option)
    elif option.endswith("ticket_keys_file"):
        TicketKeyFile(path, option)
    elif not path.read_bytes():
        raise ConfigError("it is empty")
