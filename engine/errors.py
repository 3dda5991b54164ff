"""The errors of Ratchet and the exit code each one ends a job with. Imports nothing."""

EXIT_DONE = 0
EXIT_REFUSED = 2
EXIT_FAULT = 3
EXIT_NUMERICS = 4
EXIT_KILLED = 130


class RefusedError(ValueError):
    """The spec, the data or the model is wrong: a person must change it, a retry cannot help (exit 2)."""

    exit_code = EXIT_REFUSED


class SpecError(RefusedError):
    """A field of the spec has a value that cannot work."""


class LayoutError(RefusedError):
    """A parallel layout that does not fit the model or the number of ranks."""


class DataError(RefusedError):
    """Prompts that cannot be used: empty, unreadable, overlapping, or too many bad rows."""


class ModelError(RefusedError):
    """Model files that are missing, truncated, of an unknown family, or without what the job needs."""


class FaultError(RuntimeError):
    """Something outside broke (a store, a peer, a disk): the same job may succeed when tried again (exit 3)."""

    exit_code = EXIT_FAULT


class StoreError(FaultError):
    """The object store did not answer, refused, or returned other bytes than were written."""


class CorruptError(StoreError):
    """A file has other bytes than were written."""


class MissingError(StoreError):
    """A file or object that is named but not there: a retry will not find it either."""

    exit_code = EXIT_REFUSED


class ReshardError(FaultError):
    """A weight transfer that did not complete; the destination may not be used until one does."""


class NumericsError(ArithmeticError):
    """NaN or infinity, several times in a row: the result must never be promoted (exit 4)."""

    exit_code = EXIT_NUMERICS


def exit_code_of(error: BaseException) -> int:
    """The exit code that a job ends with when `error` reaches the top."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_KILLED
    return getattr(error, "exit_code", EXIT_FAULT)
