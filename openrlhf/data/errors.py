"""How unusable data is refused."""


class DataError(ValueError):
    """The data the user named cannot be used. The message names the flag or the file, and what to do."""
