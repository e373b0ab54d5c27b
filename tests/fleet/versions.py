"""Versions of parameters as a trainer makes them, for the tests of this folder."""

import ml_dtypes
import numpy as np

__all__ = ["Training", "whole"]

BF16 = np.dtype(ml_dtypes.bfloat16)


def whole(values):
    """The one part of an array that is not sharded."""
    return [(tuple((0, size) for size in values.shape), values)]


class Training:
    """Parameters N(0, 0.02) in float32, with steps of the size of the learning rate.

    Adam's first steps are the learning rate times the sign of the gradient, and no
    later one is much larger.
    """

    def __init__(self, seed=0, rows=256, columns=256):
        self._random = np.random.default_rng(seed)
        self._master = self._random.normal(0, 0.02, (rows, columns)).astype(np.float32)

    def step(self, learning_rate):
        sign = self._random.choice([-1, 1], self._master.shape).astype(np.float32)
        self._master = self._master + np.float32(learning_rate) * sign

    @property
    def bfloat16(self):
        return self._master.astype(BF16)

    @property
    def float32(self):
        return self._master

    @property
    def int8(self):
        return np.clip(np.rint(self._master * (127 / 0.08)), -127, 127).astype(np.int8)
