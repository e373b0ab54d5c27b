"""What goes wrong with checkpoints on disk."""

__all__ = ["CheckpointError"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or a model that cannot be written as one."""
