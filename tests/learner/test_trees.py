"""Trees and rows that repeat the shared tokens have equal losses and gradients."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post import algorithms, models
from jaxrl_post.algorithms import supervised
from jaxrl_post.algorithms.preference import dpo
from jaxrl_post.algorithms.reward_model import bradley_terry, implicit_reward
from jaxrl_post.algorithms.unpaired import kto
from jaxrl_post.algorithms.whole_distributions import distribution_distillation
from jaxrl_post.data import packing
from jaxrl_post.kernels.attention import api
from jaxrl_post.learner import step as pure
from jaxrl_post.learner.step import Policy
from jaxrl_post.learner.teacher import Comparison
from jaxrl_post.losses import distill
from jaxrl_post.sharding import create_mesh, named_shardings
from jaxrl_post.tokens import Tokens
from tests import tiny
from tests.tiers import daily

# Rows of several tiles; a group has up to 9 + 4 * 8 tokens.
TILE, LENGTH = 8, 48
GROUPS, SAMPLES = 6, 4


def samples(*, pairs: bool) -> list[packing.Sequence]:
    """Groups with a prompt each, of four samples or of two pairs."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(GROUPS):
        prompt = random.integers(0, 40, random.integers(3, 10)).tolist()
        for sample in range(SAMPLES):
            size = int(random.integers(1, 9))
            sequence = packing.Sequence.of(
                prompt,
                random.integers(0, 40, size).tolist(),
                behavior_logprobs=(-2 - random.random(size)).tolist(),
                advantage=float(random.normal()),
            )
            count = len(sequence.tokens)
            label = 1 - 2 * (sample % 2)
            made.append(
                dataclasses.replace(
                    sequence,
                    labels=np.full(count, label, np.float32)
                    if pairs
                    else np.full(count, sample % 2, np.float32),
                    answers=np.full(count, len(made) + 1, np.int32),
                    groups=np.full(count, len(made) // SAMPLES + 1, np.int32),
                    truncated=None if pairs else sample == 0,
                )
            )
    return made


def branching() -> list[packing.Sequence]:
    """Two prompts with three samples each, whose episodes branch twice.

    Of each sample, the first sequence trains two turns. The second is a branch after
    the first turn, the third one continues after the second turn, and the last trains
    the first turn too.
    """
    random = np.random.default_rng(0)

    def of(*marked: tuple[list[int], bool]) -> packing.Sequence:
        """A sequence of turns, each trained or context."""
        parts = []
        for ids, trained in marked:
            logprobs = (-2 - random.random(len(ids))).tolist()
            turn = Tokens.generated(ids, logprobs, version=0)
            parts.append(turn if trained else Tokens.context(ids))
        tokens = Tokens.concatenate(parts)
        values = np.where(tokens.sampled, random.normal(), 0).astype(np.float32)
        cut = bool(random.random() < 0.5)
        marks = {
            "labels": np.full(len(tokens), len(made) // 4 % 2, np.float32),
            "answers": np.full(len(tokens), len(made) // 4 + 1, np.int32),
            "groups": np.full(len(tokens), len(made) // 12 + 1, np.int32),
        }
        return packing.Sequence(tokens, values, truncated=cut, **marks)

    made: list[packing.Sequence] = []
    for _ in range(2):
        prompt = random.integers(0, 40, 5).tolist()
        for _ in range(3):
            first, second, *others = random.integers(0, 40, (5, 3)).tolist()
            asked = (random.integers(0, 40, 2).tolist(), False)
            begun = (prompt, False), (first, False)
            made += [
                of((prompt, False), (first, True), asked, (second, True)),
                of(*begun, (others[0][:1], False), (others[0][1:], True)),
                of(*begun, asked, (second, False), ([7], False), (others[1], True)),
                of((prompt, False), (first, True), (others[2], True)),
            ]
    return made


def depth(unit: packing.Unit) -> int:
    """Number of nodes on the longest path of a tree."""
    below = unit.branches if isinstance(unit, packing.Tree) else ()
    return 1 + max(map(depth, below), default=0)


def packed(case: "Case", *, shared: bool, deep: bool):
    units = branching() if deep else samples(pairs=case.pairs)
    if case.pairs:
        units = list(zip(units[::2], units[1::2], strict=True))
    joined = packing.trees(units)
    made = packing.pack(joined if shared else units, LENGTH, 8)
    used, distinct = (sum(map(packing.num_tokens, each)) for each in (units, joined))
    if deep:
        assert min(map(depth, joined)) == 4
        # These are split, and their nodes repeated.
        assert max(map(packing.num_tokens, joined)) > LENGTH
        assert distinct < np.count_nonzero(made.ends) <= used
    else:
        assert np.count_nonzero(made.ends) == (distinct if shared else used)
    assert distinct < 0.7 * used
    return made


@dataclasses.dataclass(frozen=True)
class Case:
    """An objective on a head, with what its batches need beforehand."""

    objective: object
    head: str = "lm"
    pairs: bool = False
    credit: object = None
    compared: bool = False

    @property
    def config(self):
        return dataclasses.replace(tiny.CONFIG, head=self.head)

    @property
    def predictor(self):
        policy = Policy(self.config, temperature=0.9)
        if not self.compared:
            return policy
        teacher = tiny.params(self.config, seed=2)
        return Comparison(policy, policy, distill.forward_kl, teacher, 1)

    def scored(self, batch):
        """Adds the log-probs and values of another model, and the credit."""
        # Near the policy, so that ratios are near 1.
        other = jax.tree.map(
            lambda one, noise: one + 0.02 * noise,
            tiny.params(self.config),
            tiny.params(self.config, seed=1),
        )
        said = pure.predict(Policy(self.config, temperature=0.9), other, batch)
        found = {"reference_point": jnp.full(batch.shape, 0.1)}
        if said.logprobs is not None:
            found["reference_logprobs"] = found["proximal_logprobs"] = said.logprobs
            # Within 1 nat: float32 keeps five digits of the metrics' ratios.
            behavior = said.logprobs + 2 * (batch.behavior_logprobs + 2.5)
            found["behavior_logprobs"] = jnp.where(batch.loss_mask, behavior, 0)
            third = jax.tree.map(
                lambda one, noise: one + 0.05 * noise,
                tiny.params(self.config),
                tiny.params(self.config, seed=3),
            )
            graded = pure.predict(Policy(self.config, temperature=0.9), third, batch)
            found["prm_logprobs"] = graded.logprobs
        if said.values_after is not None and self.credit is not None:
            found["values_before"] = jnp.take_along_axis(
                said.values_after, batch.previous, axis=1
            )
            found["bootstrap"] = jnp.where(batch.truncated, said.values_after, 0.0)
        batch = batch.replace(**found)
        return batch if self.credit is None else self.credit(batch)


# The critic's gradient is twice the policy's. With a tenth of it, float32 keeps five
# digits of the sum.
PPO = algorithms.shared_backbone(
    algorithms.ppo(lambda_=0.9, value_lambda=0.8, gamma=0.95, bootstrap_truncated=True),
    coefficient=0.1,
)
PRIME = algorithms.prime(beta=3.0, gamma=0.9, bounded=True, whiten=True)
CASES = {
    "grpo": Case(algorithms.grpo(kl_coefficient=0.1).objective),
    "dapo": Case(algorithms.dapo().objective),
    "gspo": Case(algorithms.gspo().objective),
    "ppo with a critic": Case(PPO.objective, "lm+value", credit=PPO.credit),
    "prime": Case(PRIME.objective, credit=PRIME.credit),
    "implicit reward": Case(implicit_reward(beta=0.3)),
    "sft": Case(supervised.next_token),
    "dpo": Case(dpo(beta=0.3).objective, pairs=True),
    "kto": Case(kto(beta=0.3).objective, pairs=True),
    "reward model": Case(bradley_terry(), "value", pairs=True),
    "distillation": Case(distribution_distillation().objective, compared=True),
}


@functools.cache
def compiled(name: str, mesh_spec: str):
    """The program of a case on a mesh; batches of equal shape share it."""
    case = CASES[name]

    def run(params, batch):
        batch = case.scored(batch)
        empty = pure.empty_accumulator(case.predictor, case.objective, params, batch)
        return pure.accumulate(case.predictor, case.objective, params, empty, batch)

    return jax.jit(run)


@functools.cache
def outcome(name: str, shared: bool, mesh_spec: str = "", *, deep: bool = False):
    """Loss, metrics and gradients of a batch, on one device or on a mesh."""
    case = CASES[name]
    batch = packed(case, shared=shared, deep=deep)
    specs = models.param_specs(case.config)
    params = tiny.params(case.config)
    run = compiled(name, mesh_spec)
    batch = jax.tree.map(jnp.asarray, batch)
    if not mesh_spec:
        return run(params, batch)
    mesh = create_mesh(mesh_spec)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, named_shardings(specs, mesh))
        rows = NamedSharding(mesh, P(("dp", "fsdp", "ep")))
        return jax.device_get(run(params, jax.device_put(batch, rows)))


def assert_equal(found, expected):
    for name, metric in expected.metrics.items():
        mean = found.metrics[name].mean()
        np.testing.assert_allclose(
            mean, metric.mean(), rtol=1e-5, atol=1e-5, err_msg=name
        )
    np.testing.assert_allclose(
        found.loss.mean(), expected.loss.mean(), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(found.loss.count, expected.loss.count)
    largest = 0.0
    for left, right in zip(
        jax.tree.leaves(found.grads), jax.tree.leaves(expected.grads), strict=True
    ):
        # Gradients of the mean loss.
        left, right = (np.asarray(each) / expected.loss.count for each in (left, right))
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
        largest = max(largest, float(np.abs(right).max()))
    assert largest > 1e-2, "the test shows nothing"


@pytest.fixture(autouse=True)
def _several_tiles(monkeypatch):
    monkeypatch.setattr(api, "TILE", TILE)


# A mean over sequences, one over tokens, a critic, pairs and distributions: what the
# others divide and share is one of these.
@pytest.mark.parametrize(
    "name",
    daily(
        CASES, ["grpo", "ppo with a critic", "prime", "implicit reward", "distillation"]
    ),
)
def test_trees_train_as_rows_that_repeat_the_prompt(name):
    assert_equal(outcome(name, True), outcome(name, False))


# Pairs and desirable answers have a context alone in common. GRPO means over sequences,
# DAPO over tokens.
@pytest.mark.parametrize(
    "name",
    daily(
        [
            "grpo",
            "dapo",
            "gspo",
            "ppo with a critic",
            "prime",
            "implicit reward",
            "sft",
            "distillation",
        ],
        ["grpo", "ppo with a critic", "prime", "implicit reward", "sft"],
    ),
)
def test_branches_train_as_rows_that_repeat_turns(name):
    assert_equal(outcome(name, True, deep=True), outcome(name, False, deep=True))


@pytest.mark.meshes
def test_branches_train_alike_on_a_mesh():
    name = "ppo with a critic"
    found = outcome(name, True, "dp8", deep=True)
    assert_equal(found, outcome(name, False, deep=True))


# The others are in the longer tier, and guarded by these.
EVERY_DAY = {
    ("dpo", "dp2,tp4"),
    ("distillation", "fsdp4,tp2"),
    ("grpo", "dp2,cp2,tp2"),
    ("kto", "pp2,dp4"),
    ("implicit reward", "fsdp2,cp4"),
}


@pytest.mark.meshes
@pytest.mark.parametrize(
    ("name", "mesh"),
    daily(
        itertools.product(
            CASES,
            ["dp8", "fsdp4,tp2", "dp2,tp4", "dp2,cp2,tp2", "fsdp2,cp4", "pp2,dp4"],
        ),
        EVERY_DAY,
    ),
)
def test_trees_train_alike_on_every_mesh(name, mesh):
    assert_equal(outcome(name, True, mesh), outcome(name, False))
