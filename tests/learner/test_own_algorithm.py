"""`--algorithm.name module:function`: what is made of it, and what is refused."""

import functools
import io
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxrl_post import algorithms
from jaxrl_post.algorithms import (
    Algorithm,
    Corrected,
    SharedOptions,
    compose,
    contract,
    grpo,
    ppo,
    terms,
)
from jaxrl_post.config.algorithm import (
    ALGORITHMS,
    AlgorithmConfig,
    CorrectionConfig,
)
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.learner.algorithm import make_algorithm
from jaxrl_post.losses import advantages, kl, reduce
from jaxrl_post.programs.online import run_rl
from jaxrl_post.records.path import run_path


@pytest.fixture
def module(monkeypatch):
    """A module whose attributes are somebody's functions."""
    made = types.ModuleType("somebodys")
    monkeypatch.setitem(sys.modules, "somebodys", made)
    return made


def make(name="mine", **options):
    config = AlgorithmConfig(f"somebodys:{name}", **options)
    return make_algorithm(config, max_tokens=8)


def halved(*, scale: float = 0.5, clip_low: float = 0.2, **shared) -> Algorithm:
    """Group-normalised advantages, scaled."""

    def estimate(rewards, valid):
        return scale * advantages.group_normalized(rewards, valid)

    return compose(
        advantages=estimate,
        policy_loss=terms.clipped_token_ratio(clip_low=clip_low, clip_high=0.3),
        reduction=reduce.token_mean,
        **shared,
    )


REWARDS, VALID = jnp.array([[1.0, 0.0]]), jnp.ones((1, 2), bool)


def test_a_function_of_somebodys_is_an_algorithm(module):
    module.mine = halved
    plain = advantages.group_normalized(REWARDS, VALID)
    np.testing.assert_array_equal(make().advantages(REWARDS, VALID), 0.5 * plain)
    doubled = make("mine?scale=2")
    np.testing.assert_array_equal(doubled.advantages(REWARDS, VALID), 2.0 * plain)
    # Options of the command are the function's arguments.
    assert make(kl_coefficient=0.1, kl_estimator="k2").needs_reference
    with pytest.raises(ValueError, match="clip_low must be in"):
        make(clip_low=2.0)


def test_it_has_a_critic_if_it_has_a_value_objective(module):
    module.mine = lambda *, gamma=0.5, value_clip=0.2: ppo(
        gamma=gamma, value_clip=value_clip
    )
    config = AlgorithmConfig("somebodys:mine")
    assert make_algorithm(config, 8).value_objective is not None
    shared = make_algorithm(config, 8, CriticConfig(backbone="shared"))
    assert shared.value_objective is None


# One of each kind; the others differ from these in numbers.
KINDS = (
    *("grpo", "gspo", "gdpo", "remax", "ppo"),
    *("reinforce_plus_plus", "distillation"),
)


@pytest.mark.parametrize(
    "name",
    [
        each if each in KINDS else pytest.param(each, marks=pytest.mark.all)
        for each in ALGORITHMS
    ],
)
def test_the_contract_holds_for_every_algorithm_of_the_package(name):
    build = getattr(algorithms, name)
    build = functools.partial(build, threshold=0.15) if name == "dppo" else build
    build = functools.partial(build, denominator=8.0) if name == "dr_grpo" else build
    assert contract.broken(build()) is None
    if name in ("ppo", "grpo", "reinforce_plus_plus"):
        assert contract.broken(build(kl_coefficient=0.1)) is None


def raises(**_):
    raise KeyError("gone")


def of(**changes):
    return lambda: grpo()._replace(**changes)


def objective_of(change):
    """An algorithm whose objective is changed by a function of its inputs."""

    def made():
        plain = grpo()

        def objective(predictions, batch):
            return change(plain.objective, predictions, batch)

        return plain._replace(objective=objective)

    return made


def stopped(objective, predictions, batch):
    still = jax.lax.stop_gradient(predictions.logprobs)
    return objective(predictions._replace(logprobs=still), batch)


def unmasked(objective, predictions, batch):
    found = objective(predictions, batch)
    extra = predictions.logprobs.mean()
    return found._replace(loss=found.loss.replace(sum=found.loss.sum + extra))


def vector(objective, predictions, batch):
    found = objective(predictions, batch)
    return found._replace(metrics={"mine": batch.advantages})


def unreferenced(objective, predictions, batch):
    found = objective(predictions, batch)
    far = jnp.where(batch.loss_mask, batch.reference_logprobs, 0.0).sum()
    return found._replace(loss=found.loss.replace(sum=found.loss.sum + far))


def proximal_read(objective, predictions, batch):
    found = objective(predictions, batch)
    far = jnp.where(batch.loss_mask, batch.proximal_logprobs, 0.0).sum()
    return found._replace(loss=found.loss.replace(sum=found.loss.sum + far))


def rooted(objective, predictions, batch):
    """Finite, with the gradient of the root at 0."""
    found = objective(predictions, batch)
    zero = jnp.where(batch.loss_mask, predictions.logprobs * 0.0, 0.0)
    extra = jnp.sqrt(zero).sum()
    return found._replace(loss=found.loss.replace(sum=found.loss.sum + extra))


def nameless(objective, predictions, batch):
    return objective(predictions, batch)._replace(metrics=[])


def part(**parts):
    """A composition with a part of somebody's."""
    usual = {
        "advantages": advantages.group_normalized,
        "policy_loss": terms.clipped_token_ratio(clip_low=0.2, clip_high=0.2),
        "reduction": reduce.token_mean,
    }
    return lambda: compose(**(usual | parts))


def short_loss(logprobs, proximal, advantages, mask, segment_ids):
    found = terms.clipped_token_ratio(clip_low=0.2, clip_high=0.2)(
        logprobs, proximal, advantages, mask, segment_ids
    )
    return found._replace(loss=found.loss.sum(axis=-1))


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        (raises, r"somebodys:mine: KeyError: 'gone' \(.*test_own_algorithm.py:\d+\)"),
        (lambda: 3, "must return an Algorithm, .* got int"),
        (lambda: None, "must return an Algorithm, .* got NoneType"),
        (7, "no algorithm 'somebodys:mine': 'somebodys' has no function or class"),
        (
            of(advantages=lambda rewards, valid: rewards.mean(axis=1)),
            r"advantages must be float32 \[groups, samples\], here \[2, 2\]; got float",
        ),
        (
            of(advantages=lambda rewards, valid: valid),
            r"advantages must be float32 .*; got bool \[2, 2\]",
        ),
        (of(advantages=lambda rewards, valid: rewards), "advantages must be finite"),
        (
            of(advantages=lambda rewards: rewards),
            r"advantages must take \(rewards, valid\), got a function of \(rewards\)",
        ),
        (of(reads="ranks"), r"reads must be Literal\['rewards', .*; got 'ranks'"),
        (
            of(advantages=lambda rewards, valid: rewards if rewards[0, 0] > 0 else 0),
            "TracerBoolConversionError",
        ),
        (of(credit=lambda batch: batch.advantages), "credit must return a TokenBatch"),
        (
            of(credit=lambda batch: batch.replace(advantages=batch.advantages[0])),
            r"credit's advantages must be float32 \[rows, length\], here \[2, 6\]",
        ),
        (objective_of(stopped), "no gradient reaches predictions.logprobs"),
        (objective_of(unmasked), "must not look at tokens where the loss mask is F"),
        (objective_of(vector), "objective: mine must be a Metric of two scalars"),
        (objective_of(lambda *_: jnp.zeros(())), "must return an Objective whose loss"),
        (objective_of(unreferenced), "where needs_reference is True; set it"),
        (objective_of(proximal_read), "are None where a batch serves one update; take"),
        (objective_of(rooted), "gradient of the loss is not finite, got .*; jnp.where"),
        (objective_of(nameless), "metrics must be a dict of Metrics by name, got "),
        (of(objective=None), "objective must be a function; got None"),
        (of(advantages=3), "advantages must be a function; got 3"),
        (of(credit=3), "credit must be a function or None; got 3"),
        (of(needs_reference="yes"), "needs_reference must be bool; got 'yes'"),
        (of(turn_credit="x"), r"turn_credit must be Literal\[.*; got 'x'"),
        (of(advantages=lambda rewards, valid: [1.0]), "float32 .*; got list"),
        (of(advantages=lambda rewards, valid: np.asarray(rewards)), "use jax.numpy in"),
        (
            part(policy_loss=lambda *_: None),
            "policy_loss must return a PolicyTerm, got",
        ),
        (
            part(policy_loss=lambda a, b: a),
            r"policy_loss must take \(policy_logprobs, .*"
            r"got a function of \(a, b\)",
        ),
        (
            part(policy_loss=short_loss),
            r"policy_loss: loss must be one value per token",
        ),
        (
            part(reduction=lambda values, mask, ids: values.mean()),
            "reduction must return a Metric, got an array; .*reduce",
        ),
        (
            part(kl_coefficient=0.1, kl_estimator=lambda p, r: p),
            r"kl_estimator must take"
            r" \(policy_logprobs, reference_logprobs, mask\)",
        ),
        (
            part(kl_coefficient=0.1, kl_estimator=lambda p, r, m: p[0]),
            "kl_estimator must be one value per token",
        ),
        (
            part(kl_coefficient=0.1, kl_estimator=kl.k1),
            "kl_estimator must be an estimator with "
            r"the gradient of a KL.*test_own_algorithm.py:\d+",
        ),
        (part(correction=lambda p, b, m, i: p), "correction must return a Corrected"),
        (
            part(correction=lambda p, b, m, i: Corrected(p[0], {})),
            "correction: weights",
        ),
    ],
)
def test_what_breaks_the_contract_is_told(module, mine, told):
    module.mine = mine
    with pytest.raises(ConfigError, match=told) as refused:
        make()
    assert "--algorithm.name" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("absent", {}, "'somebodys' has no function or class 'absent'"),
        ("mine?scael=1", {}, "has no option 'scael'.*did you mean 'scale'"),
        ("mine?clip_low=0.1", {"clip_low": 0.2}, "an option of the command gives clip"),
        ("mine", {"clip_high": 0.3}, "clip-high: somebodys:mine does not read it"),
        ("mine", {"kl_coefficient": 0.1}, "kl-coefficient: somebodys:mine does not"),
        ("mine", {"correction": CorrectionConfig("icepop")}, r"correction\.\*: some"),
        ("mine", {"reference": "x"}, "--algorithm.reference: nothing looks at a ref"),
        ("needs", {}, "needs the option 'scale', as in 'somebodys:needs.scale=...'"),
    ],
)
def test_options_that_it_does_not_have_are_refused(module, name, options, told):
    module.mine = lambda *, scale=1.0, clip_low=0.2: grpo(clip_low=clip_low)
    module.needs = lambda *, scale: grpo()
    with pytest.raises(ConfigError, match=told):
        make(name, **options)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no.such.module:f", "there is no module 'no' on sys.path. There are grpo"),
        ("1x:f", "no algorithm '1x:f'; there are grpo"),
        (":f", "no algorithm ':f'"),
        ("grpo?dual_clp=3", "algorithm 'grpo' has no option|'dual_clp' is no option"),
        ("dppo", "algorithm 'dppo' needs the option 'threshold'"),
    ],
)
def test_names_that_nothing_has_are_refused(name, told):
    with pytest.raises(ValueError, match=told):
        make_algorithm(AlgorithmConfig(name), 8)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("mine?scale=x", {}, r"--algorithm.name: .*scale must be a number, got"),
        (
            "mine?scael=1",
            {},
            r"no option 'scael'; it has scale, clip_low, kl_coeffic.*"
            "did you mean 'scale'",
        ),
        ("mine?kl_estimator=k1", {}, "kl_estimator must be of type KlEstimator, got"),
        ("mine", {"clip_low": 2.0}, r"^--algorithm.clip-low: .*clip_low must be in"),
        (
            "fixed",
            {"correction": CorrectionConfig("icepop")},
            r"^--algorithm.correction"
            r"\.\*: .*multiple values for keyword argument 'correction'",
        ),
        ("grpo?clip_lo=1", {}, "'clip_lo'; it has clip_low, .*did you mean 'clip_low'"),
        ("grpo?clip_low=x", {}, "clip_low must be a number, got 'x'"),
        ("grpo?dual_clip=0.5", {}, r"^--algorithm.name grpo\?dual_clip=0.5: dual_clip"),
        ("grpo?dual_clip", {}, "^--algorithm.name: options in spec .* must be name=v"),
        ("grpo", {"clip_low": 2.0}, "^--algorithm.clip-low: clip_low must be in"),
        (
            "grpo",
            {"kl_coefficient": 0.1, "kl_estimator": "k1"},
            "^--algorithm.kl-estimator: kl_estimator must be an estimator with",
        ),
    ],
)
def test_a_wrong_option_is_named(module, name, options, told):
    module.mine = halved
    module.fixed = lambda **shared: grpo(correction=None, **shared)
    own = name.partition("?")[0] in vars(module)
    config = AlgorithmConfig(f"somebodys:{name}" if own else name, **options)
    with pytest.raises(ConfigError, match=told):
        make_algorithm(config, 8)


def test_what_may_be_named(module):
    class Maker:
        def __call__(self, *, clip_low: float = 0.2):
            return grpo(clip_low=clip_low)

    module.partial = functools.partial(grpo, clip_low=0.1)
    module.instance = Maker()
    module.plain = lambda: grpo()
    for name in ("partial?clip_high=0.3", "instance?clip_low=0.1", "plain"):
        assert isinstance(make(name), Algorithm)

    async def later():
        return grpo()

    module.later, module.maker = later, Maker
    for name, told in (("later", "is an async function"), ("maker", "got Maker")):
        with pytest.raises(ConfigError, match=f"--algorithm.name.*{told}"):
            make(name)


@pytest.mark.parametrize("field", ["behavior_logprobs", "reference_logprobs"])
def test_no_gradient_passes_through_the_log_probs_of_others(module, field):
    """They are data: a loss that reads them has the same gradient."""

    def leaking(objective, predictions, batch):
        found = objective(predictions, batch)
        more = jnp.where(batch.loss_mask, getattr(batch, field), 0.0).sum()
        return found._replace(loss=found.loss.replace(sum=found.loss.sum + more))

    module.mine = lambda: objective_of(leaking)()._replace(needs_reference=True)
    leaks, plain = make().objective, grpo().objective
    predictions, batch = contract._given(grpo(), 0.0, True, one_update=False)
    gradients = [
        jax.grad(lambda x, f=each: f(predictions._replace(logprobs=x), batch).loss.sum)(
            predictions.logprobs
        )
        for each in (leaks, plain)
    ]
    np.testing.assert_array_equal(*gradients)


def test_a_function_of_the_package_takes_its_own_options_too():
    assert make_algorithm(AlgorithmConfig("grpo?dual_clip=3"), 8).reads == "rewards"
    with pytest.raises(ValueError, match="dual_clip must be"):
        make_algorithm(AlgorithmConfig("grpo?dual_clip=0.5"), 8)


def test_the_options_that_all_share_are_known_by_name():
    assert set(SharedOptions.__annotations__) <= {
        "kl_coefficient", "kl_estimator", "kl_weights", "correction",
        "entropy_coefficient", "aggregation",
    }  # fmt: skip


def test_a_run_is_named_after_the_function():
    algorithm = AlgorithmConfig("my_package.my_module:mine?scale=2")
    assert str(run_path(RLConfig(algorithm=algorithm))).startswith("runs/mine-arith")


def test_a_run_says_what_is_wrong_before_a_model_is_read(module, tmp_path):
    module.mine = lambda: 3
    config = RLConfig(
        algorithm=AlgorithmConfig("somebodys:mine"),
        model="nobody/nothing",
        run_dir=str(tmp_path / "run"),
    )
    with pytest.raises(ConfigError, match="must return an Algorithm"):
        run_rl(config, console=Console(file=io.StringIO()), command="")
    assert not (tmp_path / "run").exists()
