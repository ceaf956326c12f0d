"""The two ways a run can fail, as a user meets them.

Scripts print the message as one line and exit with the class's code: `ConfigError` 2, `RunError` 1.
"""


class ConfigError(ValueError):
    """Bad input, found before any actor starts: one line that names the field, the value and the remedy."""

    exit_code = 2


class RunError(RuntimeError):
    """A run that began and could not go on: one line that names what failed, where, and how to go on."""

    exit_code = 1


class BadBatch(RunError):
    """Something in one batch itself: `pipeline.on_fault: skip` drops that batch, counts it, and goes on."""
