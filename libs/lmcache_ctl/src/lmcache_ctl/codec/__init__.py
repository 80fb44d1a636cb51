"""`lmcachectl codec`: what codecs did, what they wrote, and what they can do here."""
