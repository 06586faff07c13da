"""Errors a user can act on."""


class InputError(ValueError):
    """Bad input: one line saying what was given, what is allowed and what to do.

    The command line prints the message alone and exits with code 2.
    """


class RunError(RuntimeError):
    """A run that cannot go on (NaN loss, full disk, damaged file): one line with what happened and what is left.

    The command line prints the message alone and exits with code 1.
    """
