"""`python -m lmcache_lookup`."""

from __future__ import annotations

from lmcache_lookup.app import main

if __name__ == "__main__":
    raise SystemExit(main())
