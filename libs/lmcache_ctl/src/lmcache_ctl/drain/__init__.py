"""`lmcachectl drain`: let services hand over what only they hold, and watch them do it."""
