"""The two ways a configuration can be refused. Both carry a message a user can act on."""


class ConfigError(ValueError):
    """What the user wrote cannot be run. The message names the flag (or the file and key) and what to do."""


class NotBuiltError(RuntimeError):
    """The configuration is valid, but it asks for something this version cannot do yet."""
