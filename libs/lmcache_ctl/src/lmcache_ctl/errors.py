"""The exception of the command line.

CtlError   a command cannot do what it was asked; its text says why and what would help
"""


class CtlError(Exception):
    """A command cannot do what it was asked: one line on standard error, and exit code 1."""
