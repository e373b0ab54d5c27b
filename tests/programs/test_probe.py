"""A version of the parameters serves only if the sampler computes what it says."""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.envs import WorkerPool
from jaxrl_post.fleet.probe import Examiner, ProbeAnswers, ProbeError, ask
from jaxrl_post.learner.adapters import with_adapter
from jaxrl_post.programs.apart.answers import Answering, probe_rows
from jaxrl_post.programs.build.engine import exact_tile, make_engine
from jaxrl_post.programs.build.layouts import sampler_layout
from jaxrl_post.rollout.weights import Published
from jaxrl_post.sampler import Engine, Request, SamplingParams
from tests.programs.trainers import CONFIG, RL, make_trainer
from tests.tiers import daily

VOCAB = CONFIG.vocab_size


def moved(params, scale: float, seed: int = 0):
    """Parameters after an update: each entry moved by about `scale`."""
    rng = np.random.default_rng(seed)

    def step(leaf):
        return leaf + jnp.asarray(rng.normal(0, scale, leaf.shape), leaf.dtype)

    return jax.tree.map(step, params)


class Case:
    """A trainer's answers, and an engine of its own."""

    def __init__(self, coin, judges, *, exact: bool) -> None:
        config = dataclasses.replace(RL, exact=exact)
        self.trainer = make_trainer(coin.Coin(), judges, config)
        self.model = self.trainer.updater.model
        self.answering = Answering(self.trainer.updater, probe_rows(config, VOCAB))
        layout = sampler_layout(config.rollout, self.model)
        self.engine = make_engine(
            config.rollout,
            self.model,
            layout,
            seed=0,
            exact=exact_tile(config),
            kept_ids=128,
        )
        self.examiner = Examiner()
        self.version = 0

    def published(self, params) -> Published:
        return Published(self.engine, params, self.version)

    def switch(self, params, sampled=None) -> float:
        """Publishes; the sampler has `sampled`, if that is something else."""
        answers = self.answering.answers(params)
        sampler = self.published(params if sampled is None else sampled)
        self.version += 1
        return self.examiner.examine(ask(sampler, self.answering.rows, VOCAB), answers)


@pytest.fixture
def case(coin) -> Iterator[Callable[..., Case]]:
    with WorkerPool(coin.Coin(), 1) as judges:
        yield lambda *, exact: Case(coin, judges, exact=exact)


EXACTLY = pytest.mark.parametrize("exact", [True, False])


@EXACTLY
def test_a_sampler_with_the_parameters_is_accepted(case, exact):
    made = case(exact=exact)
    params = made.model.params
    for number in range(5):
        apart = made.switch(params)
        assert apart < 1e-5
        assert not exact or apart == 0.0
        params = moved(params, 1e-3, number)


def exchanged(params):
    """Two halves of a matrix in each other's place, as shards that were swapped."""
    first = params.layers[0]
    gate = first.mlp.gate
    half = gate.shape[-1] // 2
    swapped = jnp.concatenate([gate[..., half:], gate[..., :half]], axis=-1)
    layer = first.replace(mlp=first.mlp.replace(gate=swapped))
    return params.replace(layers=(layer, *params.layers[1:]))


@EXACTLY
def test_parts_in_a_wrong_place_are_refused(case, exact):
    made = case(exact=exact)
    made.switch(made.model.params)
    after = moved(made.model.params, 1e-3)
    with pytest.raises(ProbeError, match=r"probe: .* differ from the trainer's"):
        made.switch(after, exchanged(after))
    assert made.switch(moved(after, 1e-3)) < 1e-5


@EXACTLY
@pytest.mark.parametrize("scale", [1e-2, 1e-3])
def test_an_update_that_did_not_arrive_is_refused(case, exact, scale):
    made = case(exact=exact)
    before = made.model.params
    made.switch(before)
    message = "differ|the update has not arrived"
    with pytest.raises(ProbeError, match=message):
        made.switch(moved(before, scale), before)


@EXACTLY
def test_keys_of_another_version_are_refused(case, exact, monkeypatch):
    made = case(exact=exact)
    before = made.model.params
    made.switch(before)
    # An engine that never notices that its parameters are others.
    monkeypatch.setattr(Engine, "_notice", lambda self, params: None)
    with pytest.raises(ProbeError, match=r"probe:"):
        made.switch(moved(before, 1e-2))


@EXACTLY
def test_an_adapter_that_is_missing_is_refused(case, exact):
    made = case(exact=exact)
    model = with_adapter(AdapterConfig(rank=4), made.model, seed=0)
    made.answering.updater.model = model
    made.switch(model.params, model.whole(model.params))
    trained = moved(model.params, 1e-2)
    base = model.base
    with pytest.raises(ProbeError, match=r"probe:"):
        made.switch(trained, base)
    assert made.switch(trained, model.whole(trained)) < 1e-5


def test_a_late_joiner_without_the_adapter_is_refused(case):
    """Its first version is the tenth: the answers of version 0 tell."""
    made = case(exact=False)
    model = with_adapter(AdapterConfig(rank=4), made.model, seed=0)
    made.answering.updater.model = model
    trained = model.params
    for number in range(10):
        made.answering.answers(trained)
        trained = moved(trained, 3e-3, number)
    with pytest.raises(ProbeError, match="the update has not arrived"):
        made.switch(trained, model.base)


@pytest.mark.parametrize("count", daily([20, 1000], {20}))
@EXACTLY
def test_switches_that_are_clean_are_all_accepted(case, exact, count):
    made = case(exact=exact)
    params = made.model.params
    for number in range(count):
        made.switch(params)
        params = moved(params, 3e-4, number)


def test_what_the_engine_sampled_before_does_not_matter(case):
    made = case(exact=True)
    params = made.model.params
    made.switch(params)
    sampler = made.published(params)
    prompt = tuple(made.answering.rows.ids[0, :8].tolist())
    sampler.submit(Request(1, prompt, 3, sampling=SamplingParams(max_tokens=4)))
    while sampler.busy:
        sampler.dispatch()
        sampler.collect()
    assert made.switch(moved(params, 1e-3)) == 0.0


def test_bounds_by_hand():
    own = np.zeros((1, 4), np.float32)
    other = np.full((1, 4), -1.0, np.float32)
    answers = ProbeAnswers(own, (other,), exact=False)
    examiner = Examiner()
    with pytest.raises(ProbeError, match=r"by 0\.3 nats in the mean; at most 0\.25"):
        examiner.examine(own + np.float32(0.3), answers)
    assert examiner.examine(own + np.float32(0.01), answers) == pytest.approx(0.01)
    # Four times what was usual.
    assert examiner.examine(own + np.float32(0.039), answers) == pytest.approx(0.039)
    with pytest.raises(ProbeError, match=r"at most 0\.156"):
        examiner.examine(own - np.float32(0.2), answers)
    with pytest.raises(ProbeError, match="nan nats"):
        examiner.examine(own + np.float32(np.nan), answers)
    near = ProbeAnswers(own, (np.full((1, 4), 0.05, np.float32),), exact=False)
    with pytest.raises(
        ProbeError, match=r"0\.01 nats from an earlier version's and 0\.04"
    ):
        examiner.examine(own + np.float32(0.04), near)
