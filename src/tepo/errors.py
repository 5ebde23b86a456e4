"""The one error class for faults that the user can mend."""


class TepoError(Exception):
    """Something the user gave cannot be used: a key, a row, a file, a model.

    The message is complete on its own: it names the thing, says what was found and what is allowed. The
    command line prints it alone, without a traceback, and exits with code 2.
    """

    told_here: bool = True
    """False where another process of the run tells the same error."""
