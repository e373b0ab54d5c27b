"""Training: the pure step, the loops around it, checkpoints, and what a person sees."""
