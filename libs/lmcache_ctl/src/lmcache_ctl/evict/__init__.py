"""`lmcachectl evict`: free memory, or forget everything."""
