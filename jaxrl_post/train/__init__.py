"""Training loops and what they leave behind: state, steps, checkpoints, sinks."""
