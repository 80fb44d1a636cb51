"""Adapters to serving engines. Each module needs the engine that it is named after; this package
imports none.
"""
