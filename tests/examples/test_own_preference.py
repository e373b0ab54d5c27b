"""`--loss.name module:function`: what is made of it, and what is refused."""

import sys
import types

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post.algorithms import (
    anchored,
    contract,
    pairs,
    preference,
    reference_free,
    unpaired,
)
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.offline import (
    PREFERENCES,
    PreferenceConfig,
    PreferenceLossConfig,
)
from jaxrl_post.examples.preferences import make_preference
from jaxrl_post.losses import preference as losses
from jaxrl_post.records.path import run_path
from tests.tiers import daily

MODULES = (preference, reference_free, unpaired, anchored)


@pytest.fixture
def module(monkeypatch):
    """A module whose attributes are somebody's functions."""
    made = types.ModuleType("somebodys")
    monkeypatch.setitem(sys.modules, "somebodys", made)
    return made


def make(name="mine", **options):
    return make_preference(PreferenceLossConfig(f"somebodys:{name}", **options))


def mine(*, beta: float = 0.1, shift: float = 0.0):
    def loss(margin, valid):
        return losses.sigmoid_loss(margin - shift, valid, beta=beta)

    return pairs.compose_margins(loss, scale=beta)


def test_a_function_of_somebodys_is_a_preference_loss(module):
    module.mine = mine
    predictions, batch = contract._pair(0.0, True, unpaired=False)
    found, same, other = (
        made.objective(predictions, batch).loss.mean().item()
        for made in (make(beta=0.5), preference.dpo(beta=0.5), make("mine?shift=1"))
    )
    assert found == same != other
    config = PreferenceConfig(loss=PreferenceLossConfig("somebodys:mine?shift=1"))
    assert str(run_path(config)).startswith("runs/mine-")


# One of each kind; the values of all are compared in test_preference.py.
@pytest.mark.parametrize(
    "name",
    daily(PREFERENCES, {"dpo", "kto", "orpo", "simpo", "aot", "nca"}),
)
def test_the_contract_holds_for_every_loss_of_the_package(name):
    [build] = [getattr(each, name) for each in MODULES if name in each.__all__]
    assert contract.broken_preference(build()) is None


def of(change):
    """A loss whose objective is changed by a function of its inputs."""
    plain = preference.dpo()

    def objective(predictions, batch):
        return change(plain.objective, predictions, batch)

    return lambda: plain._replace(objective=objective)


def stopped(objective, predictions, batch):
    still = jax.lax.stop_gradient(predictions.logprobs)
    return objective(predictions._replace(logprobs=still), batch)


def unmasked(objective, predictions, batch):
    found = objective(predictions, batch)
    more = found.loss.sum + predictions.logprobs.sum()
    return found._replace(loss=found.loss.replace(sum=more))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: 3, "must return a PreferenceAlgorithm, .* got int"),
        (3, "'somebodys' has no function or class 'mine'"),
        (lambda: 1 / 0, r"ZeroDivisionError: division by zero \(.*preference.py:\d+"),
        (lambda beta: beta, "preference loss 'somebodys:mine' needs the option 'beta'"),
        (of(stopped), "no gradient reaches predictions.logprobs"),
        (of(unmasked), "must not look at tokens where the loss mask is False"),
        (of(lambda *_: jnp.zeros(())), "must return an Objective whose loss"),
        (
            lambda: preference.dpo()._replace(needs_reference=False),
            "reads batch.reference_logprobs.*needs_reference is True; set it",
        ),
    ],
)
def test_what_breaks_the_contract_is_told(module, made, told):
    module.mine = made
    with pytest.raises(ConfigError, match=f"^--loss.name.*{told}"):
        make()


def test_options_that_it_does_not_have_are_refused(module):
    module.mine = mine
    with pytest.raises(ConfigError, match="margin: somebodys:mine has no such hyperp"):
        make(margin=1.0)
    with pytest.raises(ConfigError, match="an option of the command gives beta"):
        make("mine?beta=1", beta=1.0)
    with pytest.raises(ConfigError, match=r"has no option 'shfit'.*mean 'shift'"):
        make("mine?shfit=1")
    with pytest.raises(ConfigError, match=r"^--loss.name.*shift must be a number"):
        make("mine?shift=x")
    with pytest.raises(ConfigError, match=r"^--loss.beta: .*beta must be"):
        make(beta=-1.0)
    module.short = lambda: pairs.compose_pairs(lambda c, r, v: c.policy[0], scale=1.0)
    with pytest.raises(ConfigError, match="loss must return one value per pair"):
        make("short")
    with pytest.raises(ConfigError, match=r"there is no module 'no' on sys\.path"):
        make_preference(PreferenceLossConfig("no.module:mine"))
