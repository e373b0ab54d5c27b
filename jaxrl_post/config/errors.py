"""The error of every option."""

__all__ = ["ConfigError"]


class ConfigError(ValueError):
    """A configuration that contradicts itself or what is there."""
