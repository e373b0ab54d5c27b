"""Functions that return a full configuration."""
