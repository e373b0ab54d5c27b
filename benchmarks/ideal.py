"""Seconds of a model's matrix products alone, measured with `jnp.dot`."""

import statistics
import time

import jax
import jax.numpy as jnp

from jaxrl_post.models import ModelConfig
from jaxrl_post.pretrained.presets import PRESETS
from jaxrl_post.programs.planning.work import ModelWork
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh

__all__ = [
    "dense_model",
    "head_seconds",
    "layers_parameters",
    "layers_seconds",
    "peak_flops",
]


def dense_model(name: str) -> ModelConfig:
    """The architecture of a preset whose layers are those that are counted here."""

    def counted(config: ModelConfig) -> bool:
        return config.experts is None and config.latent is None

    if name not in PRESETS or not counted(PRESETS[name]):
        names = ", ".join(each for each in PRESETS if counted(PRESETS[each]))
        raise SystemExit(f"--shape must be one of {names}, got {name!r}")
    return PRESETS[name]


def layers_seconds(config: ModelConfig, rows: int, dtype: str) -> float:
    """Seconds of all layers' products with so many tokens.

    Args:
        config: of a dense model.
        rows: number of tokens.
        dtype: of the parameters.
    """
    shapes = _layer(config)
    return config.num_layers * sum(_product(rows, k, n, dtype) for k, n in shapes)


def layers_parameters(config: ModelConfig) -> int:
    """Parameters of all layers' matrices of a dense model."""
    return config.num_layers * sum(k * n for k, n in _layer(config))


def head_seconds(config: ModelConfig, rows: int, dtype: str) -> float:
    """Seconds of the product with the vocabulary's matrix."""
    return _product(rows, config.hidden_size, config.vocab_size, dtype)


def peak_flops(dtype: str) -> float:
    """Operations per second of a large square product with `jnp.dot`."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    return 2.0 * size**3 / _product(size, size, size, dtype)


def _layer(config: ModelConfig) -> list[tuple[int, int]]:
    """Depth and columns of the matrices of a layer."""
    mesh = create_mesh("dp1", jax.devices()[:1])
    work = ModelWork(config, mesh, DEFAULT_RULES, jnp.dtype(jnp.bfloat16))
    return [
        (product.inputs, product.outputs)
        for product in work.products()
        if product.name.startswith("layers.0.")
    ]


def _product(rows: int, depth: int, columns: int, dtype: str) -> float:
    """Median seconds of one product, over several weights in turn as in a model."""
    count = max(1, min(8, 2**27 // (depth * columns * 4)))
    keys = jax.random.split(jax.random.key(0), count + 1)
    left = jax.random.normal(keys[0], (rows, depth), jnp.dtype(dtype))
    rights = [
        jax.random.normal(key, (depth, columns), jnp.dtype(dtype)) for key in keys[1:]
    ]

    @jax.jit
    def run(left: jax.Array, rights: list[jax.Array]) -> list[jax.Array]:
        return [jnp.dot(left, right) for right in rights]

    jax.block_until_ready(run(left, rights))
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        jax.block_until_ready(run(left, rights))
        times.append((time.perf_counter() - begin) / count)
    return statistics.median(times)
