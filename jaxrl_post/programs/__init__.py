"""What `launch` runs: training, evaluation, conversion and memory plans."""
