"""Learning rates and steps of each optimizer against numbers by hand and NumPy."""

import functools
import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_post import models
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.optimizer import OptimizerConfig, OptimizerName
from jaxrl_post.config.run import UpdateConfig
from jaxrl_post.learner import state as training
from jaxrl_post.learner.adapters import with_adapter
from jaxrl_post.learner.memory import layout_table
from jaxrl_post.models import MixtureOfExperts, ModelConfig
from jaxrl_post.models.adapters.lora import LoRAConfig, adapter_specs
from jaxrl_post.models.matrix import path_name
from jaxrl_post.models.spec import ParamSpec
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh, per_device_bytes
from tests import tiny
from tests.programs.trainers import make_model

# Made once: its arrays are donated to nothing.
some_model = functools.cache(make_model)
NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)

EXPERTS = ModelConfig(
    "qwen3_moe", 128, 64, 96, 1, num_heads=4, num_kv_heads=2, head_dim=64,
    qk_norm="head", experts=MixtureOfExperts(4, 2, 64),
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Peak 8; 10 optimizer steps, and one after the end.
        ({"warmup_ratio": 0.2}, [4] + [8] * 10),
        (
            {"schedule": "linear", "final_ratio": 0.5},
            [8, 7.6, 7.2, 6.8, 6.4, 6, 5.6, 5.2, 4.8, 4.4, 4],
        ),
        (
            {"schedule": "linear", "warmup_ratio": 0.5, "final_ratio": 0.25},
            [1.6, 3.2, 4.8, 6.4, 8, 8, 6.8, 5.6, 4.4, 3.2, 2],
        ),
        (
            {"schedule": "cosine", "warmup_steps": 2, "final_ratio": 0.25},
            # 2 + 6 (1 + cos(pi i / 8)) / 2
            [4, 8, *(5 + 3 * math.cos(math.pi * i / 8) for i in range(9))],
        ),
        ({"schedule": "wsd", "decay_ratio": 0.4}, [8] * 7 + [6, 4, 2, 0]),
        (
            {"schedule": "wsd", "decay_ratio": 0.4, "final_ratio": 0.5},
            [8] * 7 + [7, 6, 5, 4],
        ),
        # No more steps are left to fall in than the warm-up leaves.
        (
            {"schedule": "wsd", "decay_ratio": 1.0, "warmup_steps": 6},
            [8 / 6, 16 / 6, 4, 32 / 6, 40 / 6, 8, 8, 6, 4, 2, 0],
        ),
    ],
)
def test_rates_of_a_schedule(options, expected):
    config = OptimizerConfig(learning_rate=8.0, **options)
    rates = training.learning_rates(config, 10)
    found = [float(rates(step)) for step in range(len(expected))]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # The end is kept.
    assert float(rates(30)) == pytest.approx(expected[-1])


# A matrix of 6 inputs and 2 heads of 5 dims; two experts' matrices; a tall matrix; a
# table; and a norm, which does not decay.
SPECS = {
    "layers.0.attention.query": ParamSpec((6, 2, 5), ("embed", "heads", "head_dim")),
    "layers.0.experts.up": ParamSpec((2, 3, 4), ("experts", "embed", "ffn")),
    "layers.0.attention.output": ParamSpec((2, 5, 3), ("heads", "head_dim", "embed")),
    "embedding": ParamSpec((7, 4), ("vocab", "embed")),
    "final_norm": ParamSpec((4,), ("norm",), init="ones"),
}
RATE, DECAY = 0.01, 0.3


def drawn(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=spec.shape) for name, spec in SPECS.items()}


def moved(config: OptimizerConfig, gradients: list[dict]) -> dict[str, np.ndarray]:
    """Parameters, which are 1, after a step on each gradient."""
    optimizer = training.make_optimizer(config, SPECS, len(gradients))
    params = {name: jnp.ones(spec.shape) for name, spec in SPECS.items()}
    state = optimizer.init(params)
    for each in gradients:
        with jax.numpy_dtype_promotion("standard"):
            narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), each)
            updates, state = optimizer.update(narrow, state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.map(np.asarray, params)


def stepped(gradients: list[dict], direction) -> dict[str, np.ndarray]:
    """The same with directions of NumPy: name and gradients so far to a direction."""
    params = {name: np.ones(spec.shape) for name, spec in SPECS.items()}
    for count in range(1, len(gradients) + 1):
        for name, value in params.items():
            way = direction(name, [each[name] for each in gradients[:count]])
            decayed = 0.0 if name == "final_norm" else DECAY * value
            params[name] = value - RATE * (way + decayed)
    return params


def mean(values: list[np.ndarray], decay: float) -> np.ndarray:
    """The decayed mean of values, the newest last, as if it had begun without zeros."""
    weights = [decay**age for age in range(len(values))][::-1]
    return np.average(values, axis=0, weights=weights)


def adam(name: str, gradients: list[np.ndarray]) -> np.ndarray:
    del name
    second = mean([g**2 for g in gradients], 0.7)
    return mean(gradients, 0.6) / (np.sqrt(second) + 1e-8)


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Five steps of Newton-Schulz with the quintic of K. Jordan."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def muon(name: str, gradients: list[np.ndarray]) -> np.ndarray:
    if not name.startswith("layers"):
        return adam(name, gradients)
    # Nesterov: the mean once more with the gradient, each without the bias of zeros.
    last = gradients[-1]
    decay, count = 0.8, len(gradients)
    plain = sum(
        (1 - decay) * decay ** (count - 1 - i) * g for i, g in enumerate(gradients)
    )
    ahead = decay * plain / (1 - decay ** (count + 1))
    ahead = ahead + (1 - decay) * last / (1 - decay**count)
    if "experts" in name:
        pieces = [scaled(orthogonal(each)) for each in ahead]
        return np.stack(pieces)
    rows = 10 if "output" in name else 6
    return scaled(orthogonal(ahead.reshape(rows, -1))).reshape(last.shape)


def scaled(matrix: np.ndarray) -> np.ndarray:
    return 0.2 * np.sqrt(max(matrix.shape)) * matrix


def lion(name: str, gradients: list[np.ndarray]) -> np.ndarray:
    del name
    kept = np.zeros_like(gradients[0])
    for each in gradients[:-1]:
        kept = 0.7 * kept + 0.3 * each
    return np.sign(0.6 * kept + 0.4 * gradients[-1])


def sgd(name: str, gradients: list[np.ndarray]) -> np.ndarray:
    del name
    kept = np.zeros_like(gradients[0])
    for each in gradients:
        kept = 0.8 * kept + each
    return kept


def adafactor(name: str, gradients: list[np.ndarray]) -> np.ndarray:
    """Not factored: no dim is as large as a head's."""
    del name
    second = np.zeros_like(gradients[0])
    for step, each in enumerate(gradients, 1):
        kept = 1 - step**-0.8
        second = kept * second + (1 - kept) * each**2
    way = gradients[-1] / np.sqrt(second)
    return way / max(1.0, np.sqrt(np.mean(way**2)))


@pytest.mark.parametrize(
    ("direction", "options"),
    [
        (adam, {"name": "adamw", "beta1": 0.6, "beta2": 0.7}),
        (muon, {"name": "muon", "beta1": 0.6, "beta2": 0.7, "momentum": 0.8}),
        (lion, {"name": "lion", "beta1": 0.6, "beta2": 0.7}),
        (sgd, {"name": "sgd", "momentum": 0.8}),
        (adafactor, {"name": "adafactor"}),
    ],
    ids=["adamw", "muon", "lion", "sgd", "adafactor"],
)
def test_two_steps_are_those_of_the_paper(direction, options):
    gradients = [drawn(1), drawn(2)]
    config = OptimizerConfig(learning_rate=RATE, weight_decay=DECAY, **options)
    found, expected = moved(config, gradients), stepped(gradients, direction)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-6, err_msg=name)


def test_adafactor_divides_by_a_row_and_a_column():
    spec = ParamSpec((64, 3, 70), ("embed", "heads", "head_dim"))
    optimizer = training.make_optimizer(
        OptimizerConfig(name="adafactor", learning_rate=1.0), {"w": spec}, 1
    )
    gradient = np.random.default_rng(0).normal(size=spec.shape)
    params = {"w": jnp.zeros(spec.shape)}
    with jax.numpy_dtype_promotion("standard"):
        updates, state = optimizer.update(
            {"w": jnp.asarray(gradient, jnp.float32)}, optimizer.init(params), params
        )
    # The second moment of a head is their product over the mean.
    rows, columns = (np.mean(gradient**2, axis, keepdims=True) for axis in (2, 0))
    second = rows * columns / np.mean(rows, axis=0, keepdims=True)
    way = gradient / np.sqrt(second)
    way = way / max(1.0, np.sqrt(np.mean(way**2)))
    np.testing.assert_allclose(updates["w"], -way, rtol=1e-4, atol=1e-5)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 3 * (64 + 70) + 10


def test_adamw_has_the_state_and_the_steps_of_optax():
    """Checkpoints of earlier versions hold the state of `optax.adamw`."""
    config = OptimizerConfig(learning_rate=RATE, weight_decay=DECAY, schedule="linear")
    own = training.make_optimizer(config, SPECS, 3)
    decays = {name: name != "final_norm" for name in SPECS}
    theirs = optax.adamw(
        training.learning_rates(config, 3), 0.9, 0.95, 1e-8,
        weight_decay=DECAY, mask=decays,
    )  # fmt: skip
    params = {name: jnp.ones(spec.shape) for name, spec in SPECS.items()}
    states = own.init(params), theirs.init(params)
    for seed in range(2):
        gradient = jax.tree.map(lambda leaf: jnp.asarray(leaf, "float32"), drawn(seed))
        with jax.numpy_dtype_promotion("standard"):
            steps = [
                each.update(gradient, state, params)
                for each, state in zip((own, theirs), states, strict=True)
            ]
        states = steps[0][1], steps[1][1]
        assert jax.tree.structure(steps[0]) == jax.tree.structure(steps[1])
        jax.tree.map(np.testing.assert_array_equal, *steps)


def trained_by_muon(specs) -> set[str]:
    """Paths of the parameters that Muon orthogonalises; the others have two moments."""
    optimizer = training.make_optimizer(OptimizerConfig(name="muon"), specs, 1)
    wide = models.abstract(specs, jnp.float32)
    inner = jax.eval_shape(optimizer.init, wide)[0].inner_states["muon"].inner_state
    leaves, _ = jax.tree_util.tree_flatten_with_path(inner[0].mu)
    return {path_name(path).removeprefix("layers.0.") for path, _ in leaves}


WITH_BIASES = ModelConfig(
    "qwen2", 64, 16, 24, 1, num_heads=2, num_kv_heads=1, head="value", qkv_bias=True
)
ATTENTION = {f"attention.{name}" for name in ("query", "key", "value", "output")}


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (
            models.param_specs(EXPERTS),
            ATTENTION | {f"experts.{name}" for name in ("gate", "up", "down")},
        ),
        (
            models.param_specs(WITH_BIASES),
            ATTENTION | {f"mlp.{name}" for name in ("gate", "up", "down")},
        ),
        (
            adapter_specs(
                ModelConfig(
                    "llama", 64, 16, 24, 1, num_heads=2, num_kv_heads=1, head="value"
                ),
                LoRAConfig(
                    rank=4, targets=("output",), dora=True, whole=("value_head",)
                ),
            ),
            {"attention.output.down", "attention.output.up"},
        ),
    ],
    ids=["experts", "value head and biases", "adapter"],
)
def test_muon_trains_the_matrices_of_layers_alone(specs, expected):
    assert trained_by_muon(specs) == expected


@pytest.mark.meshes
@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_sharded_like_its_parameters(name):
    """A device holds its part; a step on the mesh equals a step on one device."""
    specs = models.param_specs(EXPERTS)
    mesh = create_mesh("fsdp2,ep2,tp2")
    config = OptimizerConfig(name=name, learning_rate=0.1)
    optimizer = training.make_optimizer(config, specs, 2)
    layout = training.shardings(specs, optimizer, mesh, DEFAULT_RULES, narrow=False)
    state = training.create(tiny.params(EXPERTS, mesh=mesh), optimizer, layout)
    for leaf in jax.tree.leaves(state.opt_state):
        # Small vectors are whole on every device.
        assert not leaf.sharding.is_fully_replicated or leaf.size <= 128
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    assert per_device_bytes(state.opt_state) < 0.5 * whole
    with jax.numpy_dtype_promotion("standard"):
        step = jax.jit(optimizer.update)
        split, _ = step(state.params, state.opt_state, state.params)
        alone = tiny.params(EXPERTS)
        expected, _ = step(alone, optimizer.init(alone), alone)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5),
        *jax.device_get((split, expected)),
    )


@pytest.mark.parametrize("name", [each for each in NAMES if each != "adafactor"])
def test_narrow_moments_take_half_and_change_little(name):
    gradients = [drawn(1), drawn(2), drawn(3)]
    wide = OptimizerConfig(name=name, learning_rate=RATE)
    narrow = OptimizerConfig(name=name, learning_rate=RATE, moment_dtype="bfloat16")
    sizes = [
        sum(
            leaf.dtype.itemsize * leaf.size
            for leaf in jax.tree.leaves(
                jax.eval_shape(
                    training.make_optimizer(config, SPECS, 3).init,
                    models.abstract(SPECS, jnp.float32),
                )
            )
        )
        for config in (wide, narrow)
    ]
    # The mean of the gradients of every parameter has two bytes fewer.
    assert sizes[0] - sizes[1] == 2 * sum(spec.size for spec in SPECS.values())
    if name == "lion":
        return
    a, b = moved(wide, gradients), moved(narrow, gradients)
    for each in SPECS:
        np.testing.assert_allclose(a[each], b[each], rtol=0, atol=0.02 * RATE * 3)
    assert any(np.any(a[each] != b[each]) for each in SPECS)


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_moves_and_its_state_is_in_the_table(name):
    model = with_adapter(AdapterConfig(rank=4), some_model(), seed=0)
    optimizer = training.make_optimizer(OptimizerConfig(name=name), model.specs, 1)
    layout = training.shardings(
        model.specs, optimizer, model.mesh, model.rules, narrow=False
    )
    state = training.create(model.params, optimizer, layout)
    gradients = jax.tree.map(jnp.ones_like, model.params)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(gradients, state.opt_state, model.params)
    for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
        # Against the gradient, by no more than the learning rate allows.
        assert -1e-4 < np.min(leaf) <= np.max(leaf) < 0, path_name(path)
    table = layout_table(
        model, UpdateConfig(), rows=1, row_tokens=8, optimizer=state.opt_state
    )
    (shown,) = (size for what, _, size in table if what == "optimizer")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    assert shown == f"{size / 2**20:,.1f}"
