"""The error class for faults that the user can mend, and how a run says that it was stopped."""


class TepoError(Exception):
    """Something the user gave cannot be used: a key, a row, a file, a model.

    The message is complete on its own: it names the thing, says what was found and what is allowed. The
    command line prints it alone, without a traceback, and exits with code 2.
    """

    told_here: bool = True
    """False where another process of the run tells the same error."""


class Diverged(TepoError):
    """The weights are of no use any more: what is saved of them would not be gone on from."""


class Stopped(Exception):
    """A signal ended a run before its last step. It is saved; the message says where."""

    told_here: bool = True
    """False where another process of the run says it."""
