"""Print the engine's part of docs/configuration.md."""

from __future__ import annotations

import re
import sys

from lmcache_core.config.engine_config import OPTIONS
from lmcache_core.config.foreign_names import FOREIGN_NAMES
from lmcache_core.config.options import SIDECAR_SETTING, Option
from lmcache_core.config.sources import (
    CONFIG_FILE_ENV,
    ENV_PREFIX,
    IGNORED_ENV_NAMES,
    SERVICE_ENV_PREFIXES,
)

_HARMLESS = re.compile(r"(?:(\S+), )?null, empty")
_HEAD = f"""\
# Engine

Every option is also a variable, `{ENV_PREFIX}<OPTION>`. A wrong name, a wrong value or options that
contradict each other are a `ConfigError` that names the fix. A GB is 2^30 bytes. ° marks this
library's own options, set by name; the others are LMCache's documented fifteen."""

_SIDECAR_HEAD = """\
With `sidecar_socket` the tiers are the sidecar's, and these options are refused. Set the sidecar's:

| option | instead |
|---|---|"""

_SOURCES = f"""\
## Where options come from

| `LMCacheEngineConfig.` | reads | default of `remote_url` |
|---|---|---|
| `from_defaults(…)` | its arguments | `{OPTIONS["remote_url"].default}` |
| `from_legacy(backend=…)` | its arguments; the backend's name selects the tiers | the same, for a remote backend |
| `from_file(path)` | one YAML file | none |
| `from_env()` | the file named by `{CONFIG_FILE_ENV}`, then `{ENV_PREFIX}<OPTION>` variables, which win | none |

In variables, truth values are `true`, `1`, `false`, `0`; empty, `none` and `null` mean none. A file
that sets `local_disk` without `max_local_disk_size` gets 5 GB; a variable does not.

Unknown `{ENV_PREFIX}…` variables are refused, except
{", ".join(f"`{name}`" for name in IGNORED_ENV_NAMES)}, those of services
({", ".join(f"`{prefix}…`" for prefix in SERVICE_ENV_PREFIXES)}) and Kubernetes' service links.

`salt` and the credentials and query of URLs are never shown. Bearer tokens are read from
files only."""  # noqa: E501

_EXAMPLES = """\
## Examples

Host memory and disk, nothing shared:

```yaml
max_local_cpu_size: 20
local_disk: file:///var/lib/lmcache/
max_local_disk_size: 200
```

A shared cache without a sidecar:

```yaml
max_local_cpu_size: 10
remote_url: lm://cache-storage:65432
remote_token_file: /etc/lmcache/token
prefill_tokens_per_s: 8000
```

With the pod's sidecar, which owns all tiers:

```
LMCACHE_SIDECAR_SOCKET=/run/lmcache/socket/sidecar.sock
LMCACHE_SAVE_DECODE_CACHE=true
LMCACHE_ERROR_HANDLING=true
```
"""

_FOREIGN_HEAD = f"""\
## LMCache's names

LMCache's YAML files and `{ENV_PREFIX}…` variables work where they mean the same or ask for nothing.
To see what each becomes, or why it is refused and what to do instead:
`python -m lmcache_core.config lmcache.yaml`. Names that are equal in both are not listed;
`local_disk` may be a plain path. LMCache's `lm://` is
[another protocol](protocols.md#lmcache-compatibility-tcp).

| name | accepted |
|---|---|"""

_PARTS_HEAD = """\
Accepted while their switch is off:

| switch | names |
|---|---|"""


def reference() -> str:
    """Return the options of the engine, as a page of its own."""
    groups: dict[str, list[Option]] = {}
    for option in OPTIONS.values():
        groups.setdefault(option.group, []).append(option)
    tables = [
        [
            f"## {group}\n",
            "| option | default | values | meaning |",
            "|---|---|---|---|",
            *(
                f"| `{option.name}`{'' if option.documented else '°'} | {_default(option)} |"
                f" {_values(option)} | {option.meaning} |"
                for option in options
            ),
        ]
        for group, options in groups.items()
    ]
    instead = [
        f"| `{name}` | {option.beside_sidecar.removeprefix(SIDECAR_SETTING)} |"
        for name, option in OPTIONS.items()
        if option.beside_sidecar
    ]
    rows: list[str] = []
    harmless: dict[str, list[str]] = {}
    parts: dict[str, list[str]] = {}
    for name, known in FOREIGN_NAMES.items():
        only = _HARMLESS.fullmatch(known.accepted)
        if known.part_of:
            parts.setdefault(known.part_of, []).append(f"`{name}`")
        elif only is None:
            rows.append(f"| `{name}` | {known.accepted} |")
        else:
            value = "" if only[1] is None else f"{only[1]}: "
            harmless.setdefault(value, []).append(f"`{name}`")
    sections = [
        [_HEAD],
        *tables,
        [_SIDECAR_HEAD, *instead],
        [_SOURCES],
        [_FOREIGN_HEAD, *rows],
        [
            "Accepted only if null, empty, or as shown:\n",
            *(f"- {value}{', '.join(names)}" for value, names in harmless.items()),
        ],
        [_PARTS_HEAD, *(f"| `{of}` | {', '.join(ours)} |" for of, ours in parts.items())],
        [_EXAMPLES],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _values(option: Option) -> str:
    if option.choices:
        return ", ".join(map(str, option.choices))
    if option.kind in (int, float):
        low, high = option.limits
        return f"{low:.12g} … {high:.12g} {option.unit}".strip()
    return "" if option.form is None or option.form.wanted == "text" else option.form.wanted


def _default(option: Option) -> str:
    if option.default is None:
        return "none"
    if isinstance(option.default, bool):
        return str(option.default).lower()
    return f"`{option.default}`" if option.default != "" else "empty"


if __name__ == "__main__":
    sys.stdout.write(reference())
