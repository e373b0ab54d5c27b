"""Samplers in other processes: the trainer's side, and the sampler's program."""
