"""Lower bounds on the kernels' times, counted without a chip."""
