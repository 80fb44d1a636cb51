"""`lmcachectl`: the command-line tool of the cache. Each group of commands is a package."""
