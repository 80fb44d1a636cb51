"""`lmcachectl bench`: a bounded load on one service, cleaned up afterwards."""
