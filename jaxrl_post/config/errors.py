"""The error for bad options."""

__all__ = ["ConfigError"]


class ConfigError(ValueError):
    """Options that contradict each other, or the files and devices that exist."""
