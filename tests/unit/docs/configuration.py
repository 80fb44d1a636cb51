"""Write docs/configuration.md: `make config-docs`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from lmcache_broker.settings import BrokerSettings
from lmcache_core.config.reference import reference
from lmcache_lookup.settings import LookupSettings
from lmcache_node.settings import NodeSettings
from lmcache_servicekit.options import OptionText, options_of
from lmcache_servicekit.redis_settings import RedisSettings
from lmcache_servicekit.settings import ServiceSettings
from lmcache_sidecar.settings import SidecarSettings
from lmcache_storage.settings import StorageSettings
from lmcache_webhook.settings import WebhookSettings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"
SERVICES: Mapping[str, type[ServiceSettings]] = {
    "lmcache-sidecar": SidecarSettings,
    "lmcache-storage": StorageSettings,
    "lmcache-lookup": LookupSettings,
    "lmcache-broker": BrokerSettings,
    "lmcache-webhook": WebhookSettings,
}
SHARED: Mapping[str, type[ServiceSettings]] = {
    "Every service": ServiceSettings,
    "Sidecar and cache_storage": NodeSettings,
    "Redis, for lookup and broker": RedisSettings,
}
HEAD = """\
# Configuration

Written by `make config-docs`. `--help` of a service lists its options, `--print-config` what is in
force.

A service reads a YAML file (`--config`), then variables, which win: `disk_gb` of the sidecar is
`LMCACHE_SIDECAR_DISK_GB`. Lists and mappings are YAML there, an empty variable is unset. A name or
value that is wrong ends the start with code 2. Port 0 takes a free one. A GB is 2^30 bytes, a MB
2^20. `*` stands for a name or a place in a list. Prefixes: """
TABLE = ["| option | default | values | meaning |", "|---|---|---|---|"]
WORDS = ("required", "none", "empty", "true", "false")
HEADING = re.compile(r"^#", re.MULTILINE)


def page() -> str:
    """Return the text of docs/configuration.md."""
    prefixes = ", ".join(f"`{settings.env_prefix}`" for settings in SERVICES.values())
    sections = [f"{HEAD}{prefixes}."]
    shared = {
        option.name: option for settings in SHARED.values() for option in options_of(settings)
    }
    for title, settings in SHARED.items():
        options = [
            option
            for option in options_of(settings)
            if not option.is_required and title == _home(option)
        ]
        sections.append("\n".join([f"## {title}\n", *TABLE, *map(_row, options)]))
    for name, settings in SERVICES.items():
        every = list(options_of(settings))
        owners = {option.name: option.owner for option in every}
        own = [option for option in every if not _is_same(option, shared)]
        own.sort(
            key=lambda option: (
                option.name != "port",
                owners[option.name.partition(".")[0]] is not settings,
            )
        )
        sections.append("\n".join([f"## {name}\n", f"{settings.about}\n", *TABLE, *map(_row, own)]))
    return "\n\n".join([*sections, HEADING.sub("##", reference())])


def _home(option: OptionText) -> str:
    """Return the first shared section that has an option."""
    return next(
        title
        for title, settings in SHARED.items()
        if any(option.name == one.name for one in options_of(settings) if not one.is_required)
    )


def _is_same(option: OptionText, shared: Mapping[str, OptionText]) -> bool:
    known = shared.get(option.name)
    return known is not None and (known.default, known.meaning) == (option.default, option.meaning)


def _row(option: OptionText) -> str:
    default = "required" if option.is_required else option.default
    is_code = default not in WORDS and (" " not in default or not default[0].isalpha())
    cells = (
        f"`{option.name}`",
        f"`{default}`" if is_code else default,
        option.values,
        option.meaning,
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
