"""`lmcachectl sidecar`: a running sidecar, and why it does not have what is missed."""
