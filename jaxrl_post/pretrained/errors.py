"""What goes wrong with checkpoints on disk."""

__all__ = ["CheckpointError", "CheckpointWarning"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or a model that cannot be written as one."""


class CheckpointWarning(UserWarning):
    """A checkpoint that was read, and that is likely to be damaged."""
