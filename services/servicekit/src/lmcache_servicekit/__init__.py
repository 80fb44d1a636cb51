"""The parts shared by all services: settings, entry point, problems, health, metrics,
authentication.

Import from the modules below. Services depend on this package and on `lmcache_core`, never on one
another.
"""
