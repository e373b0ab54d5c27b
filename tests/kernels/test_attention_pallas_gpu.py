"""Attention on Hopper GPUs, interpreted: several tiles, wide heads, races, padding.

That it equals the definition is shown in test_attention.py, with the other
implementations. The tensor cores multiply bfloat16 only. So the error is compared with
the error of the reference in bfloat16, both against the reference in float32 on the
same numbers. That the kernels compile for a Hopper GPU is shown in
test_compiled_for_gpu.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_post.kernels.attention import (
    Scoring,
    Sight,
    attention,
    gpu_kernels,
    pallas_gpu,
)
from jaxrl_post.kernels.attention.kernel_tiles import KernelSettings
from jaxrl_post.kernels.attention.packed import Facts, Plan, attend_packed
from jaxrl_post.kernels.attention.pallas_gpu import GpuTiles
from tests.kernels.test_pallas_tpu import forest, operands
from tests.tiers import daily


def both_passes(positions, ends, arrays, **options):
    """Attended values and gradients of query, key and value; 0 for padding."""
    *inputs, towards = arrays
    counts = (ends > 0)[:, :, None, None]

    def run(query, key, value):
        out = attention(
            query, key, value,
            Sight(positions, positions, ends), **options,
        )  # fmt: skip
        return jnp.where(counts, out, jnp.zeros_like(out))

    out, pull = jax.vjp(run, *inputs)
    return out, *pull(jnp.where(counts, towards, jnp.zeros_like(towards)))


def error(found, exact):
    found, exact = (np.asarray(array, np.float64) for array in (found, exact))
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def test_several_tiles():
    """Two blocks a row; latent attention's heads, a window that cuts tiles, a cap."""
    check(2, 140, 2, 1, 192, 128, 100, 5.0, True)


def test_wide_heads():
    """Their blocks are others: 64 keys in the gradient of keys, and 32 that pass."""
    check(1, 100, 2, 1, 256, 256, None, 30.0, False)


# Two blocks of two heads have both what one block has and what four have.
@pytest.mark.parametrize(
    ("enough", "parts"), daily([(1, 1), (5, 2), (1000, 4)], [(5, 2)])
)
def test_heads_of_a_group_in_one_block_or_in_several(monkeypatch, enough, parts):
    """Two key/value heads of four query heads each, and two blocks of keys each."""
    monkeypatch.setattr(gpu_kernels, "ENOUGH_BLOCKS", enough)
    assert gpu_kernels.key_parts(4, 4) == parts
    traced = []
    kernel = pallas_gpu.key_kernel

    def key_kernel(work, inputs, results, buffers):
        traced.append(results[0].shape)
        kernel(work, inputs, results, buffers)

    monkeypatch.setattr(pallas_gpu, "key_kernel", key_kernel)
    check(1, 140, 8, 2, 64, 64, None, None, False)
    assert traced == [(1, 2 * parts, 256, 64)]


def check(batch, length, heads, kv_heads, dim, value_dim, window, softcap, sinks):
    """The errors of both passes are at most twice the reference's."""
    positions, ends = forest(batch, length)
    arrays = operands(batch, length, heads, kv_heads, dim, value_dim, jnp.bfloat16)
    biases = jnp.linspace(-1.0, 2.0, heads) if sinks else None
    scoring = Scoring(window, None, softcap, biases)

    def run(arrays, **implementation):
        return both_passes(positions, ends, arrays, scoring=scoring, **implementation)

    run = jax.jit(run, static_argnames=("implementation", "interpret"))
    found = run(arrays, implementation="pallas_gpu", interpret=True)
    rounded = run(arrays, implementation="reference")
    wide = [array.astype(jnp.float32) for array in arrays]
    exact = run(wide, implementation="reference")
    for array, other, expected in zip(found, rounded, exact, strict=True):
        assert array.dtype == jnp.bfloat16
        assert error(array, expected) <= 2 * error(other, expected)


def test_no_access_races_with_another():
    positions, ends = forest(1, 150)
    query, key, value, towards = operands(1, 150, 2, 1, 64, 64, jnp.bfloat16)
    indices = jnp.broadcast_to(jnp.arange(150, dtype=jnp.int32), ends.shape)
    facts = Facts(indices, positions, ends)
    params = plgpu.InterpretGPUParams(detect_races=True)
    plan = Plan(GpuTiles(KernelSettings(0.125, None, None, None, params)))

    @jax.jit
    def run(*inputs):
        out, pull = jax.vjp(
            lambda *inputs: attend_packed(plan, *inputs, facts, None), *inputs
        )
        return out, *pull(jnp.where((ends > 0)[:, :, None, None], towards, 0))

    arrays = [a.astype(jnp.float32) for a in (query, key, value, towards)]
    exact = both_passes(positions, ends, arrays, implementation="reference")
    for array, expected in zip(run(query, key, value), exact, strict=True):
        assert error(array, expected) <= 2**-7


def test_a_row_of_padding_gives_zeros():
    query, key, value, _ = operands(1, 40, 1, 1, 64, 64, jnp.bfloat16)
    ends = jnp.zeros((1, 40), jnp.int32).at[0, :3].set(3)
    positions = jnp.arange(40, dtype=jnp.int32)[None]

    @jax.jit
    def run(query, key, value):
        return attention(
            query, key, value,
            Sight(positions, positions, ends),
            implementation="pallas_gpu", interpret=True,
        )  # fmt: skip

    out = run(query, key, value)
    assert not out[:, 3:].any()
    assert out[:, :3].all()


def test_what_it_cannot_compute_is_refused():
    query, key, value, _ = operands(1, 4, 1, 1, 320, 256, jnp.bfloat16)
    at = jnp.arange(4, dtype=jnp.int32)[None]
    sight = Sight(at, at, jnp.full_like(at, 4))
    run = {"implementation": "pallas_gpu", "interpret": True, "sight": sight}
    with pytest.raises(ValueError, match="at most 256 numbers are needed; got 320 and"):
        attention(query, key, value, **run)
    narrow = [array[..., :64].astype(jnp.float32) for array in (query, key, value)]
    with pytest.raises(ValueError, match="pallas_gpu computes with bfloat16; got floa"):
        attention(*narrow, **run)
