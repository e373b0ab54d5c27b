"""Programs of `launch`: training, evaluation, conversion and memory plans."""
