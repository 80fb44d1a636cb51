"""`lmcachectl explain`: where each chunk of a prompt is, and why it is missing."""
