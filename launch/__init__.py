"""Command-line programs; `python -m launch.grpo --help`."""
