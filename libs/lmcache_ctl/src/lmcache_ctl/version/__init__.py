"""`lmcachectl version`: which release runs here, and at each service."""
