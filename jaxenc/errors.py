"""Errors that name their culprit."""


class InputError(ValueError):
    """An item cannot be encoded. The message starts with the item's name: a path, or what it is, such as `<array>`."""


class ConfigError(ValueError):
    """A config describes no encoder that is known here, or contradicts itself."""
