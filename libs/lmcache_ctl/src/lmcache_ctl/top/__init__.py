"""`lmcachectl top`: what all services are doing just now."""
