"""A decoder of a few thousand parameters whose predictions are far from uniform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_post.models import DecoderParams, ModelConfig, param_specs
from jaxrl_post.models.spec import ParamSpec, is_spec
from jaxrl_post.sharding import named_shardings

# Eight query and four key/value heads, so that tp4 splits them; 40 tokens, 8 x 5.
CONFIG = ModelConfig(
    "llama",
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    max_length=64,
)
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def params(
    config: ModelConfig = CONFIG,
    *,
    seed: int = 0,
    dtype: jnp.dtype = F32,
    mesh: Mesh | None = None,
) -> DecoderParams[jax.Array]:
    """Weights and biases around 0, norms around 1, all of standard deviation 0.5.

    Drawn with NumPy: nothing is compiled.
    """
    rng = np.random.default_rng(seed)

    def draw(spec: ParamSpec) -> np.ndarray:
        center = 1.0 if spec.init == "ones" else 0.0
        return rng.normal(center, 0.5, spec.shape).astype(spec.dtype(dtype))

    specs = param_specs(config)
    drawn = jax.tree.map(draw, specs, is_leaf=is_spec)
    if mesh is None:
        return jax.tree.map(jnp.asarray, drawn)
    return jax.device_put(drawn, named_shardings(specs, mesh))


@functools.cache
def shared() -> DecoderParams[jax.Array]:
    """`params()` of CONFIG, made once; donate them to nothing."""
    return params()
