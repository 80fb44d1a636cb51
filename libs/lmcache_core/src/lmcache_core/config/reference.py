"""Prints docs/configuration.md: `python -m lmcache_core.config.reference >
docs/configuration.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from lmcache_core.config.contradictions import CONTRADICTIONS
from lmcache_core.config.engine_config import OPTIONS
from lmcache_core.config.foreign_names import FOREIGN_NAMES
from lmcache_core.config.options import Option
from lmcache_core.config.sources import (
    CONFIG_FILE_ENV,
    ENV_PREFIX,
    IGNORED_ENV_NAMES,
    SERVICE_ENV_PREFIXES,
)

_HEAD = """\
# Configuration of the engine

Made by `python -m lmcache_core.config.reference > docs/configuration.md` from the model in `lmcache_core/config/`; a test compares the
two. The services have options of their own: each prints them with `--print-config`.

A wrong name, an impossible value or a contradiction is a `ConfigError` that names the option, its value and what to do. Sizes are in GB,
which are 2^30 bytes. Options marked with ° are this library's own and go by name; the others are the documented fifteen, in whose order
the constructors take them.
"""  # noqa: E501

_SOURCES = f"""\
## Where options come from

| `LMCacheEngineConfig.` | default of `remote_url` | what it reads |
|---|---|---|
| `from_defaults(…)` | `{OPTIONS["remote_url"].default}` | its arguments |
| `from_legacy(backend=…)` | the same, if the backend is a remote one | its arguments; the backend's name decides the tiers |
| `from_file(path)` | none | one YAML file |
| `from_env()` | none | the environment, and the file that it names |

`from_env` takes, the later winning over the earlier:

1. the defaults,
2. the YAML file that `{CONFIG_FILE_ENV}` names, if it is set,
3. `{ENV_PREFIX}<OPTION>` variables. (LMCache ignores these beside a file.)

In a variable, truth values are `true`, `1`, `false` or `0`, and nothing, `none` or `null` is none where none is allowed. A file that names
`local_disk` without `max_local_disk_size` gets 5 GB; a variable does not.

Not options, and ignored:

- {", ".join(f"`{name}`" for name in IGNORED_ENV_NAMES)},
- the services' own variables, {", ".join(f"`{prefix}…`" for prefix in SERVICE_ENV_PREFIXES)}, unless one is the name of an option,
- what Kubernetes adds for a service: `…_SERVICE_HOST`, `…_SERVICE_PORT…`, `…_PORT_80_TCP…`, and whatever begins with `tcp://`, `udp://`
  or `sctp://`.

Any other variable that begins with `{ENV_PREFIX}` and names no option is refused.

Secrets: `salt`, and the credentials and query of URLs, are shown neither in `repr(config)` nor in an error. The bearer token is only ever
read from `remote_token_file`.
"""  # noqa: E501

_EXAMPLES = """\
## Examples

Host memory and disk, nothing shared:

```yaml
max_local_cpu_size: 20
local_disk: file:///var/lib/lmcache/
max_local_disk_size: 200
```

A cache that many pods share, without a sidecar:

```yaml
max_local_cpu_size: 10
remote_url: lm://cache-storage:65432
remote_token_file: /etc/lmcache/token
prefill_tokens_per_s: 8000
```

Beside the pod's sidecar, which owns memory, disk, peers and the remote tier:

```
LMCACHE_SIDECAR_SOCKET=/run/lmcache/socket/sidecar.sock
LMCACHE_SAVE_DECODE_CACHE=true
LMCACHE_ERROR_HANDLING=true
```
"""

_FOREIGN_HEAD = f"""\
## LMCache's names

YAML files of LMCache, and its `{ENV_PREFIX}…` variables, are accepted where they mean the same or ask for nothing. What else they ask
for is refused, with the way out. The documented fifteen and `save_unfull_chunk` have the same names and are not listed; `local_disk` may
also be a plain path, `/dir/`. A name beside an option of ours that says something else is refused too. LMCache's and our `lm://` differ on
the wire (docs/protocols.md).

| name | accepted | else |
|---|---|---|
"""  # noqa: E501


def reference() -> str:
    """Return the text of docs/configuration.md."""
    groups: dict[str, list[Option]] = {}
    for option in OPTIONS.values():
        groups.setdefault(option.about.group, []).append(option)
    parts = [_HEAD]
    for group, options in groups.items():
        parts.append("\n".join([f"## {group}\n", *_table(options)]) + "\n")
    parts.append("\n".join(["## What cannot be had together\n", *_contradictions()]) + "\n")
    parts += [_SOURCES, _FOREIGN_HEAD + "\n".join(_foreign_names()) + "\n", _EXAMPLES]
    return "\n".join(parts)


def _table(options: list[Option]) -> Iterator[str]:
    yield "| option | environment variable | type | default | unit | allowed | meaning |"
    yield "|---|---|---|---|---|---|---|"
    for option in options:
        cells = (
            f"`{option.name}`" + ("" if option.documented else "°"),
            f"`{ENV_PREFIX}{option.name.upper()}`",
            option.kind_name,
            _default(option),
            option.about.unit,
            _cell(option.allowed),
            _cell(f"{option.about.meaning} {_hint(option)}".strip()),
        )
        yield f"| {' | '.join(cells)} |"


def _contradictions() -> Iterator[str]:
    yield "| options | why, and what to do |"
    yield "|---|---|"
    for contradiction in CONTRADICTIONS:
        yield (
            f"| {', '.join(f'`{name}`' for name in contradiction.names)} |"
            f" {_cell(contradiction.why)} |"
        )
    for option in OPTIONS.values():
        if option.about.beside_sidecar:
            yield (
                f"| `{option.name}`, `sidecar_socket` | the tiers are the sidecar's;"
                f" {_cell(option.about.beside_sidecar)} |"
            )


def _foreign_names() -> Iterator[str]:
    """Yield one row for a name, one for all that belong to the same switch and are left out for the
    same reason.
    """
    rows: dict[tuple[str, str], list[str]] = {}
    for name, known in FOREIGN_NAMES.items():
        rows.setdefault((known.part_of, known.instead if known.part_of else name), []).append(name)
    for names in rows.values():
        known = FOREIGN_NAMES[names[0]]
        yield (
            f"| {', '.join(f'`{name}`' for name in names)} | {_cell(known.accepted)} |"
            f" {_cell(known.instead)} |"
        )


def _default(option: Option) -> str:
    if option.default is None:
        return "none"
    if isinstance(option.default, bool):
        return str(option.default).lower()
    return f"`{option.default}`" if option.default != "" else "empty"


def _hint(option: Option) -> str:
    return f"({option.about.hint[0].upper()}{option.about.hint[1:]}.)" if option.about.hint else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
