"""What the kernels take at best, counted without a chip."""
