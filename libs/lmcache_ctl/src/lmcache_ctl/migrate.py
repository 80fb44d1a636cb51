"""`lmcachectl migrate`: what an LMCache configuration becomes here, and what does not.

Each name in the source has one fate: it is a value of the result, or a sentence names it. Each
value of the result is the source's: unchanged, or in our form by a rule below. A size that the
source does not have is not written but named as one to choose.
"""

from __future__ import annotations

import decimal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import SplitResult, quote, urlsplit

import msgspec
import typer
from lmcache_core.config import OPTIONS
from lmcache_core.config.foreign_names import FOREIGN_NAMES, translated
from lmcache_core.config.options import (
    DISK_SERDES,
    SIDECAR_SETTING,
    as_directory_url,
    directory_of_url,
    is_directory_url,
    problems_of,
)
from lmcache_core.errors import ConfigError

from lmcache_ctl.errors import UsageError
from lmcache_ctl.lmcache_files import KNOWN, RESP_NAMES, read
from lmcache_ctl.output import Output, plain, print_text, show, yaml_text

SAME_IN_SIDECAR: Final = frozenset(
    {"eviction_policy", "chunk_ttl_s", "tier_timeout_s", "lookup_url", "distributed_url"}
)
"""Engine options whose name and meaning the sidecar has too."""
OF_BOTH: Final = frozenset({"tier_timeout_s"})
"""Those that the engine reads with a sidecar, too."""
IN_CHART: Final = frozenset({"eviction_policy", "chunk_ttl_s", "remote_serde", "disk_serde"})
"""Sidecar settings that the chart's `sidecar.config` takes unchanged; it sets addresses, files and
tokens by itself.
"""
CHART_SIZES: Final = {"arena_gb": "arenaSize", "disk_gb": "diskSize"}
"""Sidecar settings in GiB that are quantities below `sidecar` in the chart."""
PART_OF_TIER: Final = {
    "local_disk": ("max_local_disk_size", "local_disk_serde", "disk_fsync"),
    "remote_url": ("remote_serde", "remote_token_file"),
}
"""Options that mean nothing without that tier."""
NOT_IN_VLLM: Final = "enable_blending"
MEMORY, DISK_SIZE = "max_local_cpu_size", "max_local_disk_size"
LARGEST_GB: Final = {"arena_gb": 1 << 16, "disk_gb": 1 << 20}
"""What a sidecar takes, less than an engine."""
MAX_NAME_CHARS: Final = 253
MAX_NUMBER_BITS: Final = 64
PAIR: Final = ("lookup_url", "broker_url")
"""Settings that a sidecar takes together only."""
IN_URL: Final = {
    "resp": ("redis", "username", "password", ""),
    "valkey": ("redis", "valkey_username", "valkey_password", "valkey_database"),
}
"""By LMCache's scheme: ours, and where `extra_config` has the parts of its URL."""
PER_GPU: Final = (
    "LMCache's sizes are per GPU: multiply arena_gb and disk_gb by the tensor-parallel size"
)


class Migration(msgspec.Struct, frozen=True):
    """The result of a migration.

    Attributes:
        sidecar: Settings of `lmcache-sidecar`.
        engine: Options of the engines, in their own file or environment.
        chart: Values of the chart.
        to_choose: By the sidecar's setting, why it is not in `sidecar`: it has to be chosen.
        notes: What to look at.
        refused: A line for each option without a counterpart, with the way out.
    """

    sidecar: dict[str, Any]
    engine: dict[str, Any]
    chart: dict[str, Any]
    to_choose: dict[str, str]
    notes: list[str]
    refused: list[str]


def migrate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help=(
                "LMCache's YAML file (LMCACHE_CONFIG_FILE), or what holds its options: variables,"
                " Kubernetes manifests, values of a chart."
            ),
        ),
    ],
    output: Output = "table",
) -> None:
    """Turn an LMCache configuration into settings of a sidecar and values of the chart.

    Nothing is written and no service is asked. Exits with 1 when options are
    refused: each is printed with its replacement. Passwords are part of the
    settings, and of nothing else that is printed.
    """
    found = migration_of(file)
    show(found, output, _print)
    if found.refused:
        raise typer.Exit(1)


def migration_of(file: Path) -> Migration:
    """Return what a file becomes.

    Raises:
        UsageError: It cannot be read, or holds nothing of LMCache's.
    """
    try:
        found = read(str(file))
    except ConfigError as exc:
        raise UsageError(str(exc)) from exc
    migrator = _Migrator(str(file), found.named)
    migrator.migrate()
    sizes = [PER_GPU] if migrator.sidecar.keys() & CHART_SIZES.keys() else []
    notes = [*sizes, *found.notes, *migrator.notes]
    if not found.named and not found.notes and not found.refused:
        notes.append("the file sets nothing")
    return Migration(
        migrator.sidecar,
        migrator.engine,
        migrator.chart(),
        migrator.to_choose,
        list(map(_printable, notes)),
        [_printable(line) for line in (*found.refused, *migrator.refused)],
    )


class _Migrator:
    """Gives each option its fate."""

    def __init__(self, origin: str, named: Mapping[Any, Any]) -> None:
        self.sidecar: dict[str, Any] = {}
        self.engine: dict[str, Any] = {}
        self.to_choose: dict[str, str] = {}
        self.notes: list[str] = []
        self.refused: list[str] = []
        self._origin = origin
        self._named = dict(named)
        self._sources: dict[str, str] = {}

    def migrate(self) -> None:
        self._take_remote()
        unset = [
            name
            for name, value in self._named.items()
            if value is None and name in KNOWN and name != "local_device"
        ]
        for name in unset:
            del self._named[name]
        tuning = [
            name
            for name, value in self._named.items()
            if name in FOREIGN_NAMES
            and FOREIGN_NAMES[name].is_tuning
            and FOREIGN_NAMES[name].translate(value, self._named) is None
        ]
        for name in tuning:
            del self._named[name]
        self._list("no effect here, left out", tuning)
        values, refused = translated(self._named, OPTIONS, self._origin)
        self.refused += refused
        idle: list[str] = []
        asks_nothing: list[str] = []
        for name, value in self._named.items():
            if name not in FOREIGN_NAMES:
                continue
            known = FOREIGN_NAMES[name]
            meant = known.translate(value, self._named)
            if meant == {}:
                (idle if known.part_of else asks_nothing).append(name)
            self._sources |= dict.fromkeys(meant or (), name)
        idle += self._remove_parts(values)
        possible = {}
        for name, value in values.items():
            problems = problems_of({name: value}, OPTIONS)
            if not problems and isinstance(value, str) and not _is_utf8(value):
                problems = [f"{name}={OPTIONS[name].shown(value)}: must be text in UTF-8"]
            if problems:
                source = self._sources.get(name)
                self.refused += [f"{source} means {each}" if source else each for each in problems]
            else:
                possible[name] = value
        idle += self._remove_parts(possible)
        self._list("left out, without what they belong to", idle)
        self._list("left out, they ask for nothing", [*unset, *asks_nothing])
        self._take_sizes(possible, values)
        same = [name for name, value in possible.items() if value == OPTIONS[name].default]
        self._list("left out, the default here too", [self._sources.get(n, n) for n in same])
        for name, value in possible.items():
            if name not in same:
                self._place(name, value)
        self._check_whole()

    def chart(self) -> dict[str, Any]:
        sizes = {
            CHART_SIZES[name]: f"{decimal.Decimal(str(self.sidecar[name])).normalize():f}Gi"
            for name in CHART_SIZES
            if name in self.sidecar
        }
        config = {name: self.sidecar[name] for name in self.sidecar if name in IN_CHART}
        chart: dict[str, Any] = {"sidecar": sizes | {"config": config}}
        if self.engine:
            options = {f"lmcache.{name}": value for name, value in self.engine.items()}
            chart["modelDefaults"] = {"connector": {"options": options}}
        return chart

    def _list(self, why: str, names: list[Any]) -> None:
        if names:
            self.notes.append(f"{why}: {', '.join(map(str, names))}")

    def _take_remote(self) -> None:
        """Bring a remote tier that LMCache names otherwise, and its password, into our form."""
        url = self._named.get("remote_url")
        parts = _split(url)
        scheme = parts.scheme
        if scheme == "fs" and not (parts.query or parts.fragment):
            directory = as_directory_url(parts.path)
            if is_directory_url(directory):
                self._named["remote_url"] = directory
                self.notes.append(
                    f"remote_url: fs:// is {directory} here, without host and port; that directory"
                    " must exist"
                )
        elif scheme in IN_URL:
            self._take_redis(parts)
        for name in RESP_NAMES:
            if self._named.pop(name, None) is not None:
                self.refused.append(
                    f"{self._origin}: {name}: belongs to a remote_url with resp://; write all of it"
                    " into remote_url, redis://user:password@host:port, percent-encoded"
                )

    def _take_redis(self, url: SplitResult) -> None:
        """Write user, password and database of `resp://` and `valkey://` into the URL."""
        scheme, place = url.scheme, url.netloc
        ours, *names = IN_URL[scheme]
        extra = self._named.get("extra_config")
        if extra is not None and not isinstance(extra, Mapping):
            return
        rest = dict(extra or {})
        if rest.get("valkey_mode", "standalone") != "standalone":
            return
        parts = [rest.get(name) for name in names]
        parts += [self._named.get(name) for name in RESP_NAMES] if scheme == "resp" else []
        if not all(map(_is_part, parts)):
            return
        parts = parts[: len(names)]
        user, password, database = ("" if part is None else str(part) for part in parts)
        used = [f"extra_config.{name}" for name in names if name and name in rest]
        if scheme == "resp":  # LMCache prefers the file to the environment
            host = place.rpartition("@")[2] or str(self._named.get("resp_host", ""))
            if ":" not in host and "resp_port" in self._named:
                host = f"{host}:{self._named['resp_port']}"
            place = place.rpartition("@")[0] + ("@" if "@" in place else "") + host
            user = user or str(self._named.get("resp_username", ""))
            password = password or str(self._named.get("resp_password", ""))
            for name in RESP_NAMES:
                used += [name] if self._named.pop(name, None) is not None else []
        if user or password:
            place = f"{quote(user, '')}:{quote(password, '')}@{place.rpartition('@')[2]}"
        path = f"/{database}" if database else url.path
        self._named["remote_url"] = url._replace(scheme=ours, netloc=place, path=path).geturl()
        for name in (*names, "valkey_mode"):
            rest.pop(name, None)
        if extra is not None:
            self._named["extra_config"] = rest
        self.notes.append(
            f"remote_url: {scheme}:// is {ours}:// here"
            + (f", with {', '.join(used)}" if used else "")
        )

    def _remove_parts(self, values: dict[str, Any]) -> list[str]:
        """Remove what belongs to a tier that is not there; return its names in the source."""
        gone = [
            name
            for tier, parts in PART_OF_TIER.items()
            for name in parts
            if name in values and values.get(tier) is None
        ]
        for name in gone:
            del values[name]
        return [self._sources.get(name, name) for name in gone]

    def _take_sizes(self, possible: dict[str, Any], values: Mapping[str, Any]) -> None:
        """Take the sizes that are there, and name those that have to be chosen."""
        has_disk = possible.get("local_disk") is not None
        for setting, name in (("arena_gb", MEMORY), ("disk_gb", DISK_SIZE)):
            if setting == "disk_gb" and not has_disk:
                continue
            size = possible.pop(name, None)
            source = self._sources.get(name, name)
            if size is not None and 0 < size <= LARGEST_GB[setting]:
                self.sidecar[setting] = size
            elif size is not None:
                self.to_choose[setting] = (
                    f"{source}={size}: must be a number above 0, at most {LARGEST_GB[setting]}"
                )
            elif name in values:
                self.to_choose[setting] = f"{source} is refused"
            else:
                self.to_choose[setting] = f"{source} is not in the source"

    def _place(self, name: str, value: Any) -> None:
        option = OPTIONS[name]
        said = f"{name}={option.shown(value)}"
        if name in self._sources:
            said = f"{self._sources[name]}: {said}"
        if name == NOT_IN_VLLM:
            self.refused.append(
                f"{said}: vLLM does not blend here; see docs/blend.md, or leave it out"
            )
        elif name == "local_cpu":
            self.notes.append(f"{said}: a sidecar always has memory; its size is arena_gb")
        elif name == "local_disk":
            directory = directory_of_url(value)
            if _is_utf8(directory):
                self._set("disk_path", directory, said)
            else:
                self.refused.append(f"{said}: must be text in UTF-8")
        elif name == "remote_serde" and value not in DISK_SERDES:
            self.refused.append(
                f"{said}: a sidecar has {', '.join(DISK_SERDES)}; leave it out or take one"
            )
        elif problem := _address_problem(name, value):
            self.refused.append(f"{said}: {problem}")
        elif name == "salt":
            self.notes.append(f"{name}: write it into a file and set the sidecar's salt_file to it")
        elif name in SAME_IN_SIDECAR:
            self._set(name, value, said)
            if name == "tier_timeout_s" and name in self._sources:
                self.notes.append(
                    f"{said}: the longest wait on a tier here, after it there is a miss"
                )
            self.engine |= {name: value} if name in OF_BOTH else {}
        elif option.beside_sidecar.startswith(SIDECAR_SETTING):
            for setting in option.beside_sidecar.removeprefix(SIDECAR_SETTING).split(" and "):
                self._set(setting, value, said)
            if name == "remote_url":
                told = "the chart sets it to its own cache_storage"
                if value.startswith("lm"):
                    told += ", and an LMCache server speaks another protocol than lm:// here"
                self.notes.append(f"{said}: {told}")
        elif option.beside_sidecar:
            self.notes.append(f"{said}: {option.beside_sidecar}")
        else:
            self.engine[name] = value

    def _set(self, setting: str, value: Any, said: str) -> None:
        """Set what two options may ask for."""
        if self.sidecar.setdefault(setting, value) != value:
            self.refused.append(
                f"{said}: a sidecar has one {setting}, and another option sets it; keep one"
            )

    def _check_whole(self) -> None:
        """Name what a sidecar lacks, or would refuse, although each value is valid."""
        from lmcache_core.p2p import is_encrypted

        if sum(name in self.sidecar for name in PAIR) == 1:
            [missing] = [name for name in PAIR if name not in self.sidecar]
            self.to_choose[missing] = "peers are found through lookup_url and broker_url together"
        for key, cert in (
            ("tls_key_file", "tls_cert_file"),
            ("tls_client_key_file", "tls_client_cert_file"),
            ("tls_client_ca_file", "tls_cert_file"),
        ):
            if key in self.sidecar and cert not in self.sidecar:
                self.to_choose[cert] = f"{key} needs it"
        url = self.sidecar.get("distributed_url")
        is_tls = "tls_cert_file" in self.sidecar or "tls_cert_file" in self.to_choose
        if url is not None and is_tls and not is_encrypted(url):
            del self.sidecar["distributed_url"]
            self.refused.append(
                f"distributed_url={url!r}: what is served there is encrypted; write lm+tls://"
            )
        own = [name for name in self.sidecar if name not in (*IN_CHART, *CHART_SIZES)]
        if own:
            self.notes.append(f"not in values.yaml, which has its own: {', '.join(own)}")


def _address_problem(name: str, value: Any) -> str:
    """Return why a sidecar would refuse an address that an engine takes, or ""."""
    from lmcache_core.p2p import parse_distributed_url
    from lmcache_core.storage.remote.members import hosts_of
    from lmcache_core.wire.json_http import check_base_url

    try:
        if name in PAIR:
            if not value.startswith(("http://", "https://")):
                return f"must be our {name.removesuffix('_url')} service, http://host:port"
            check_base_url("its", value)
        elif name == "distributed_url":
            parse_distributed_url(value)
        elif name == "remote_url" and value.startswith(("lm://", "lm+tls://")):
            hosts_of(value)
        elif name == "peer_tls_name" and len(value) > MAX_NAME_CHARS:
            return f"must have at most {MAX_NAME_CHARS} characters"
    except (ConfigError, ValueError) as exc:
        return str(exc)
    return ""


def _split(url: Any) -> SplitResult:
    try:
        return urlsplit(url if isinstance(url, str) else "")
    except ValueError:
        return urlsplit("")


def _is_part(value: Any) -> bool:
    """Return whether a value can be part of a URL."""
    if isinstance(value, str):
        return _is_utf8(value)
    return value is None or (isinstance(value, int) and value.bit_length() < MAX_NUMBER_BITS)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(line: str) -> str:
    return line.encode("utf-8", "backslashreplace").decode()


def _print(found: Migration) -> None:
    choose = [f"{name} has to be chosen: {why}" for name, why in found.to_choose.items()]
    _print_yaml("sidecar.yaml, settings of lmcache-sidecar", found.sidecar, choose)
    if found.engine:
        _print_yaml("options of the engines, in addition to sidecar_socket", found.engine)
    sizes = [
        f"sidecar.{CHART_SIZES[name]} has to be chosen: {why}"
        for name, why in found.to_choose.items()
        if name in CHART_SIZES
    ]
    _print_yaml("values.yaml, of the chart", found.chart, sizes)
    for title, lines in (("To look at:", found.notes), ("Refused:", found.refused)):
        if lines:
            print_text(title)
        for line in lines:
            print_text(f"  {line}")


def _print_yaml(title: str, values: Mapping[str, Any], comments: Sequence[str] = ()) -> None:
    head = "\n".join(f"# {line}" for line in (title, *comments))
    typer.echo(plain(f"{head}\n{yaml_text(dict(values))}"))
