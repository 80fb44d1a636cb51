"""`lmcachectl status`: the whole cluster at a glance."""
