"""The exceptions of the command line.

CtlError         a command cannot do what it was asked; its text says why and what would help
`-- UsageError   it was called incorrectly
"""


class CtlError(Exception):
    """A command cannot do what it was asked: one line on standard error, and exit code 1."""


class UsageError(CtlError):
    """An option or a variable is wrong: one line on standard error, and exit code 2."""
