"""The errors that a person has to act on; each message is one line: what is wrong, and how to mend it."""


class SetupError(Exception):
    """Something outside of the code must be mended first; commands print it and exit with 2."""


class NotReadyError(SetupError):
    """What is asked for cannot be done yet; commands print it and exit with 1."""


class AwayError(SetupError):
    """A server does not answer: at the start a setting to be mended, later an outage, which passes."""
