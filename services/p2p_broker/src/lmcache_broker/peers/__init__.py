"""Who is alive, at which address, for whom."""
