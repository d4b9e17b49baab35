"""Every exception this project raises on purpose.

    PagedJaxError
    ├── ConfigError            an engine option, model directory or checkpoint cannot be used
    │   └── CheckpointError    a weight file is missing, corrupt or does not fit the model
    ├── InvalidRequestError    one request is wrong; the engine is untouched
    └── EngineDeadError        the engine stopped; nothing more will be answered

A message gives the value, the limit and the remedy. A broken invariant of our own is an assert.
"""


class PagedJaxError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(PagedJaxError):
    """An engine option, model directory or checkpoint cannot be used."""


class CheckpointError(ConfigError):
    """A weight file is missing, corrupt, truncated or does not fit the model's shapes."""


class InvalidRequestError(PagedJaxError, ValueError):
    """One request is wrong. `param` names the offending field, None where there is no single one."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class EngineDeadError(PagedJaxError):
    """The engine stopped after an unrecoverable error; the message holds the cause."""
