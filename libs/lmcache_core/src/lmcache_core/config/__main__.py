"""`python -m lmcache_core.config FILE`: show which options an engine would take from a
configuration file, including LMCache's own names.

Prints the options as YAML with secrets masked; or one line for each that is refused, and exits with
code 2.
"""

from __future__ import annotations

import argparse
import sys

import yaml

from lmcache_core.config import OPTIONS, LMCacheEngineConfig
from lmcache_core.errors import ConfigError

EXIT_BAD_CONFIG = 2


def main() -> int:
    """Check the file named on the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lmcache_core.config", description="Check a configuration file of an engine."
    )
    parser.add_argument("file", help="YAML, as LMCACHE_CONFIG_FILE names it")
    try:
        config = LMCacheEngineConfig.from_file(parser.parse_args().file)
    except ConfigError as exc:
        sys.stderr.write(f"{exc}\n")
        return EXIT_BAD_CONFIG
    values = {name: getattr(config, name) for name in OPTIONS}
    shown = {
        name: OPTIONS[name].shown(value).strip("'") if isinstance(value, str) else value
        for name, value in values.items()
    }
    sys.stdout.write(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
