"""A bfloat16 model's gradient is the float32 one's, but for the rounding of numbers.

What it must not be is a sum in bfloat16 over the tokens of a batch: such a sum stops
growing at 256 equal terms.
"""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels.token_logprob import Scaling, token_logprob
from jaxrl_post.models import (
    LatentAttention,
    MixtureOfExperts,
    ModelConfig,
    forward,
    initialize,
    param_specs,
    unembedding,
)

VOCAB = 64
PLAIN = ModelConfig(
    "llama", VOCAB, 64, 96, 1, num_heads=4, num_kv_heads=2, max_length=512
)
# Every token goes to all experts: with a choice, rounding would change the choice.
CASES = {
    "biases, norms of queries and keys, tied": dataclasses.replace(
        PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm="head",
        tie_embeddings=True,
    ),
    "soft caps, norms on both sides": dataclasses.replace(
        PLAIN, norm_placement="both", norm_plus_one=True, attention_softcap=50.0,
        logit_softcap=30.0, embedding_scale=8.0, activation="gelu_tanh",
    ),
    "experts with biases, sinks": dataclasses.replace(
        PLAIN, sinks=True, activation="gpt_oss",
        experts=MixtureOfExperts(2, 2, 48, biases=True, router_bias=True),
    ),
    "latent attention, a shared expert": dataclasses.replace(
        PLAIN, num_kv_heads=4, head_dim=24, latent=LatentAttention(16, 16, 8, 16, 24),
        experts=MixtureOfExperts(2, 2, 48, shared_size=32, shared_gate=True),
    ),
}  # fmt: skip


def gradient(config, dtype):
    """Gradients of the summed NLL of Zipf-distributed tokens, by path."""

    def moved(path, leaf):
        # Values that bfloat16 holds, so that both models are the same.
        rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
        return jnp.asarray(
            np.asarray(leaf) + 0.05 * rng.normal(size=leaf.shape), jnp.bfloat16
        ).astype(dtype)

    params = initialize(jax.random.key(0), param_specs(config))
    params = jax.tree_util.tree_map_with_path(moved, params)
    odds = 1.0 / np.arange(1, VOCAB + 1)
    tokens = np.random.default_rng(0).choice(VOCAB, (8, 512), p=odds / odds.sum())
    tokens = jnp.asarray(tokens, jnp.int32)

    def loss(params):
        hidden = forward(params, config, tokens)
        cap = config.logit_softcap
        weight = unembedding(params)
        found = token_logprob(
            hidden[:, :-1], weight, tokens[:, 1:], scaling=Scaling(softcap=cap)
        )
        return -found.logprob.sum()

    leaves = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.float64(leaf)
        for path, leaf in leaves
    }


@pytest.mark.parametrize("name", CASES)
def test_no_gradient_is_summed_in_bfloat16(name):
    expected = gradient(CASES[name], jnp.float32)
    for path, found in gradient(CASES[name], jnp.bfloat16).items():
        size = np.linalg.norm(expected[path])
        assert size > 0, path
        # Rounding gives up to 0.011; experts' biases, summed in bfloat16, gave 0.5.
        assert np.linalg.norm(found - expected[path]) < 0.02 * size, path
