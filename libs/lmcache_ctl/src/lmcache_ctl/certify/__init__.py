"""`lmcachectl certify`: gates that something must pass before it is used."""
