"""`lmcachectl bench`: put a bounded load on one service, and clean up afterwards."""
