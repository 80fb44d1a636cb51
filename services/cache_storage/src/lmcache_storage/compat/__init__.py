"""The listener for unmodified LMCache clients: off by default, without credentials, bound to one
tenant.

`dialect` has the headers, `values` the stored values, `server` the listener and its connections.

Source: `docs/protocols.md`, "LMCache compatibility".
"""
