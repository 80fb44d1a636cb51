"""`python -m lmcache_ctl`."""

from lmcache_ctl.cli import main

if __name__ == "__main__":
    main()
