"""Adapters to serving engines. Each package needs the engine that it is named after; the modules
beside them are any engine's, and import none.
"""
