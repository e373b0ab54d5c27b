"""Log-probs from logits: the definition, the kernel's numbers, bounded memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxrl_post.kernels.token_logprob import Scaling, token_logprob
from jaxrl_post.kernels.token_logprob.reference import from_logits
from jaxrl_post.losses.logprobs import token_logprobs

CHUNKED = {"chunk_bytes": 4 * 11 * 3}


def example(rows=3, length=5, vocab=11, hidden=8, seed=3):
    rng = np.random.default_rng(seed)
    states = jnp.array(rng.normal(size=(rows, length, hidden)), jnp.float32)
    table = jnp.array(rng.normal(size=(vocab, hidden)), jnp.float32)
    tokens = jnp.array(rng.integers(0, vocab, (rows, length)), jnp.int32)
    mask = jnp.array(rng.random((rows, length)) < 0.7)
    return states, table, tokens, mask


@pytest.mark.parametrize("options", [{}, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_definition_in_float64(options, temperature):
    states, table, tokens, mask = example()
    logits = states @ table.T
    found = token_logprobs(logits, tokens, mask, temperature=temperature, **options)
    every = log_softmax(np.asarray(logits, np.float64) / temperature, axis=-1)
    taken = np.take_along_axis(every, np.asarray(tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(found, np.where(mask, taken, 0.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_what_sampler_and_trainer_say(options, temperature):
    states, table, tokens, mask = example()
    logits = jnp.einsum("btd,vd->btv", states, table)
    ours = partial(token_logprobs, temperature=temperature, **options)
    found = jax.jit(ours)(logits, tokens, mask)
    sampler = jax.jit(partial(from_logits, temperature=temperature))(logits, tokens)
    # The sampler's to the bit but one: a sum of exponentials may be taken in any order.
    np.testing.assert_array_max_ulp(
        np.asarray(found), np.where(mask, sampler.logprob, 0.0), maxulp=2
    )
    trainer = token_logprob(
        states, table, tokens, mask=mask, scaling=Scaling(temperature)
    )
    np.testing.assert_allclose(found, trainer.logprob, rtol=0, atol=1e-6)


def test_gradients_equal_the_kernels():
    states, table, tokens, mask = example()
    weights = jnp.cos(jnp.arange(15.0)).reshape(3, 5)

    def ours(states, table):
        logits = jnp.einsum("btd,vd->btv", states, table)
        return (weights * token_logprobs(logits, tokens, mask, **CHUNKED)).sum()

    def kernels(states, table):
        return (weights * token_logprob(states, table, tokens, mask=mask)[0]).sum()

    for one, other in zip(
        jax.grad(ours, (0, 1))(states, table),
        jax.grad(kernels, (0, 1))(states, table),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_sixteen_bit_logits_are_scored_in_float32():
    states, table, tokens, mask = example()
    low = (states @ table.T).astype(jnp.bfloat16)
    np.testing.assert_array_equal(
        token_logprobs(low, tokens, mask),
        token_logprobs(low.astype(jnp.float32), tokens, mask),
    )


@pytest.mark.parametrize("gradient", [False, True])
def test_float32_logits_are_in_memory_a_chunk_at_a_time(gradient):
    tokens, vocab = 4096, 8192
    shapes = (
        jax.ShapeDtypeStruct((tokens, vocab), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.bool_),
    )

    def total(*arrays):
        return token_logprobs(*arrays, chunk_bytes=2**20).sum()

    function = jax.grad(total) if gradient else total
    memory = jax.jit(function).lower(*shapes).compile().memory_analysis()
    whole = 4 * tokens * vocab
    # Apart from inputs and outputs: a copy in bfloat16 at most.
    assert memory.temp_size_in_bytes <= whole / 2 + 2**23


def test_hyperparameters_are_checked():
    states, table, tokens, mask = example()
    with pytest.raises(ValueError, match=r"temperature must be > 0, got 0\.0"):
        token_logprobs(states @ table.T, tokens, mask, temperature=0.0)
    with pytest.raises(ValueError, match="chunk_bytes must be > 0, got 0"):
        token_logprobs(states @ table.T, tokens, mask, chunk_bytes=0)
