"""`lmcachectl lookup`: who holds which chunk, by the lookup service."""
