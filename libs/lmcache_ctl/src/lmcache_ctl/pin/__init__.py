"""`lmcachectl pin`: keep chunks in memory for a while."""
