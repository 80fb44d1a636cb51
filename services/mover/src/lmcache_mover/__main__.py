"""`python -m lmcache_mover`."""

from __future__ import annotations

from lmcache_mover.app import main

if __name__ == "__main__":
    raise SystemExit(main())
