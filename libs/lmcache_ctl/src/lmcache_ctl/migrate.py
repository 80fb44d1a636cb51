"""`lmcachectl migrate`: what an LMCache configuration file becomes here, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from lmcache_ctl.errors import UsageError
from lmcache_ctl.output import Output, OutputFormat, plain, print_text, show

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
MEMORY: Final = "max_local_cpu_size"
PER_GPU: Final = (
    "LMCache's sizes are per GPU: multiply arena_gb and disk_gb by the tensor-parallel size"
)


class Migration(msgspec.Struct, frozen=True):
    """The result of a migration.

    Attributes:
        sidecar: Settings of `lmcache-sidecar`.
        engine: Options of the engines, in their own file or environment.
        chart: Values of the chart.
        notes: What to look at.
        refused: A line for each option without a counterpart, with the way out.
    """

    sidecar: dict[str, Any]
    engine: dict[str, Any]
    chart: dict[str, Any]
    notes: list[str]
    refused: list[str]


def migrate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="LMCache's YAML file (LMCACHE_CONFIG_FILE).")
    ],
    output: Output = OutputFormat.TABLE,
) -> None:
    """Turn an LMCache configuration into settings of a sidecar and values of the chart.

    Nothing is written and no service is asked. Exits with 1 when options are
    refused: each is printed with its replacement.
    """
    found = migration_of(file)
    show(found, output, _print)
    if found.refused:
        raise typer.Exit(1)


def migration_of(file: Path) -> Migration:
    """Return what a file becomes.

    Raises:
        UsageError: It cannot be read or is not a mapping.
    """
    from lmcache_core.config import OPTIONS
    from lmcache_core.config.foreign_names import FOREIGN_NAMES, translated
    from lmcache_core.config.options import problems_of
    from lmcache_core.config.sources import DEFAULT_DISK_GB, named_in_file
    from lmcache_core.errors import ConfigError

    try:
        named = named_in_file(str(file), OPTIONS)
    except ConfigError as exc:
        raise UsageError(str(exc)) from exc
    values, refused = translated(named, OPTIONS, str(file))
    possible = {
        name: value for name, value in values.items() if not problems_of({name: value}, OPTIONS)
    }
    refused += problems_of(values, OPTIONS)
    if possible.get("local_disk") is not None:
        possible.setdefault("max_local_disk_size", DEFAULT_DISK_GB)
    idle = [
        name
        for name in named
        if name in FOREIGN_NAMES
        and FOREIGN_NAMES[name].part_of
        and FOREIGN_NAMES[name].translate(named[name], named) == {}
    ]
    for tier, parts in PART_OF_TIER.items():
        if possible.get(tier) is None:
            idle += [name for name in possible if name in parts]
            possible = {name: possible[name] for name in possible if name not in parts}
    sidecar: dict[str, Any] = {"arena_gb": possible.pop(MEMORY, OPTIONS[MEMORY].default)}
    engine: dict[str, Any] = {}
    notes = [PER_GPU]  # arena_gb is always there
    if idle:
        notes.append(f"left out, without what they belong to: {', '.join(idle)}")
    for name, value in possible.items():
        if value != OPTIONS[name].default:
            _place(name, value, sidecar, engine, notes, refused)
    sizes = {CHART_SIZES[name]: f"{sidecar[name]:g}Gi" for name in sidecar if name in CHART_SIZES}
    config = {name: sidecar[name] for name in sidecar if name in IN_CHART}
    chart: dict[str, Any] = {"sidecar": sizes | {"config": config}}
    if engine:
        options = {f"lmcache.{name}": value for name, value in engine.items()}
        chart["modelDefaults"] = {"connector": {"options": options}}
    return Migration(sidecar, engine, chart, notes, refused)


def _place(
    name: str,
    value: Any,
    sidecar: dict[str, Any],
    engine: dict[str, Any],
    notes: list[str],
    refused: list[str],
) -> None:
    """Put one option where it belongs."""
    from lmcache_core.config import OPTIONS
    from lmcache_core.config.options import DISK_SERDES, SIDECAR_SETTING, directory_of_url

    option = OPTIONS[name]
    said = f"{name}={option.shown(value)}"
    if name == NOT_IN_VLLM:
        refused.append(f"{said}: vLLM does not blend here; see docs/blend.md, or leave it out")
    elif name == "local_cpu":
        notes.append(f"{said}: a sidecar always has memory; its size is arena_gb")
    elif name == "local_disk":
        sidecar["disk_path"] = directory_of_url(value)
    elif name == "remote_serde" and value not in DISK_SERDES:
        refused.append(f"{said}: a sidecar has {', '.join(DISK_SERDES)}; leave it out or take one")
    elif name == "lookup_url" and not value.startswith(("http://", "https://")):
        refused.append(f"{said}: must be our lookup service, http://host:port")
    elif name == "salt":
        notes.append(f"{name}: write it into a file and set the sidecar's salt_file to that")
    elif name in SAME_IN_SIDECAR:
        sidecar[name] = value
        engine |= {name: value} if name in OF_BOTH else {}
    elif option.beside_sidecar.startswith(SIDECAR_SETTING):
        for setting in option.beside_sidecar.removeprefix(SIDECAR_SETTING).split(" and "):
            sidecar[setting] = value
        if name == "remote_url":
            told = "the chart sets it to its own cache_storage"
            if value.startswith("lm"):
                told += ", and an LMCache server speaks another protocol than lm:// here"
            notes.append(f"{said}: {told}")
    elif option.beside_sidecar:
        notes.append(f"{said}: {option.beside_sidecar}")
    else:
        engine[name] = value


def _print(found: Migration) -> None:
    _print_yaml("sidecar.yaml, settings of lmcache-sidecar", found.sidecar)
    if found.engine:
        _print_yaml("options of the engines, in addition to sidecar_socket", found.engine)
    _print_yaml("values.yaml, of the chart", found.chart)
    for title, lines in (("To look at:", found.notes), ("Refused:", found.refused)):
        if lines:
            print_text(title)
        for line in lines:
            print_text(f"  {line}")


def _print_yaml(title: str, values: Mapping[str, Any]) -> None:
    import yaml

    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=1000)
    typer.echo(plain(f"# {title}\n{text}"))
