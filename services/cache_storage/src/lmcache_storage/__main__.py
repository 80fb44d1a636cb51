"""Run `python -m lmcache_storage`."""

import sys

from lmcache_storage.app import main

if __name__ == "__main__":
    sys.exit(main())
