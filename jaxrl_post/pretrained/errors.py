"""The error and the warning about checkpoints on disk."""

__all__ = ["CheckpointError", "CheckpointWarning"]


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or a model cannot be saved as a checkpoint."""


class CheckpointWarning(UserWarning):
    """A checkpoint was read, but it is probably damaged."""
