"""Tiles of rows whose results do not depend on what is computed around them."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post.kernels.row_tiles import isolated


@pytest.mark.parametrize("shape", [(8, 16), (1, 16), (256, 16)])
def test_a_compiled_program_keeps_the_computation_apart(shape):
    # Samples seldom show a product that was merged with the next sum; the program does.
    def program(certain, rows, weights):
        product = isolated(lambda x, w: x @ w, certain, 3.0 * rows, weights)
        return product + rows.sum()

    given = jnp.array(True), jnp.ones(shape), jnp.ones((16, 16))
    compiled = jax.jit(program).lower(*given).compile()
    operations = [
        line for line in compiled.as_text().splitlines() if " conditional(" in line
    ]
    assert len(operations) == 1
    assert (compiled(*given) == 48.0 + shape[0] * 16).all()
