"""The entropy coder on the CPU: tables, interleaved rANS streams, and the machine code of its
loops. Needs numpy; the loops need numba.
"""
