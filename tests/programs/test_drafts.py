"""The model that guesses for a run's sampler: what is opened, and what is refused."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_post import models, pretrained
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.learner.model import Model
from jaxrl_post.programs.build.engine import make_engine, sampler_memory
from jaxrl_post.programs.build.layouts import sampler_layout
from jaxrl_post.sampler import Request, SamplingParams
from jaxrl_post.sharding import MeshError, create_mesh
from tests.pretrained.test_mtp_files import DENSE, EXPERTS, with_layer
from tests.programs.trainers import CONFIG, RL, make_model
from tests.tiers import daily


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


@pytest.fixture
def save(tmp_path, model):
    """Writes a model directory; the trained model's own without arguments."""

    def saved(tokenizer: Tokenizer = model.tokenizer, **changes) -> str:
        config = dataclasses.replace(CONFIG, **changes)
        params = models.initialize(jax.random.key(0), models.param_specs(config))
        folder = tmp_path / "draft"
        pretrained.save(folder, config, params, tokenizer=tokenizer)
        return str(folder)

    return saved


def engine_of(model: Model, draft: str | None, *, exact: int = 0, **options):
    rollout = dataclasses.replace(RL.rollout, draft=draft, guesses=3, **options)
    weights = sampler_layout(rollout, model)
    return make_engine(rollout, model, weights, seed=0, exact=exact)


def test_the_draft_guesses_for_the_runs_sampler(model, save):
    folder = save()
    tokens = (5, 6, 7)
    request = Request(1, tokens, 4, sampling=SamplingParams(max_tokens=4))
    plain = engine_of(model, None).generate(model.params, [request])
    engine = engine_of(model, folder, guess_rows=64)
    found = engine.generate(model.params, [request])
    # The same parameters: four tokens in one pass.
    assert (engine.guessing.passes, engine.guessing.tokens) == (4, 16)
    for ours, other in zip(found, plain, strict=True):
        np.testing.assert_array_equal(ours.tokens.ids, other.tokens.ids)
    params, cache = engine.drafting
    assert len(jax.tree.leaves(params)) == len(jax.tree.leaves(model.params))
    assert jax.tree.map(np.shape, cache) == jax.tree.map(np.shape, engine.cache)
    assert engine_of(model, None).drafting is None


def test_a_draft_with_other_tokens_is_refused(model, save):
    other = Tokenizer.train(["other words"], vocab_size=CONFIG.vocab_size)
    with pytest.raises(ConfigError, match=r"--rollout.draft: .* has other ids than"):
        engine_of(model, save(other))


def test_a_draft_with_a_short_context_is_refused(model, save):
    with pytest.raises(
        ConfigError, match=r"--rollout.draft: .* context of 19 tokens, .* 20; use a"
    ):
        engine_of(model, save(max_length=19))


def test_models_with_states_guess_but_not_exactly_nor_as_drafts(model, save):
    changes = {
        "model_type": "lfm2",
        "qk_norm": "head",
        "qkv_bias": False,
        "recurrence": models.ShortConvolution(kernel=3),
        "layers": (models.LayerSpec("recurrence"),),
    }
    stateful = dataclasses.replace(
        model, config=dataclasses.replace(model.config, **changes)
    )
    assert engine_of(stateful, None).sizes.guesses == 3
    with pytest.raises(ConfigError, match=r"--rollout.guesses: layers of lfm2 carry"):
        engine_of(stateful, None, exact=8)
    with pytest.raises(
        ConfigError, match=r"--rollout.draft: .*, a lfm2, carry a state"
    ):
        engine_of(model, save(**changes))


@pytest.mark.meshes
def test_a_mesh_that_does_not_divide_the_draft_is_refused(model, save):
    wide = dataclasses.replace(model, mesh=create_mesh("dp2,tp4"))
    with pytest.raises(MeshError, match=r"^--rollout.draft: .*heads"):
        engine_of(wide, save())


def test_a_draft_without_guesses_is_refused():
    rollout = dataclasses.replace(RL.rollout, draft="anywhere")
    with pytest.raises(ConfigError, match=r"--rollout.draft: anywhere guesses"):
        check_options(dataclasses.replace(RL, rollout=rollout))


@pytest.mark.parametrize("family", daily([DENSE, EXPERTS], {EXPERTS}))
def test_the_models_own_layer_guesses(model, family, tmp_path):
    folder = tmp_path / "model"
    with_layer(folder, family)
    config, params = pretrained.load(folder, mesh=model.mesh)
    model = dataclasses.replace(model, name=str(folder), config=config, params=params)
    request = Request(1, (5, 6, 7), 4, sampling=SamplingParams(max_tokens=4))
    plain = engine_of(model, None).generate(params, [request])
    engine = engine_of(model, None, mtp=True, guess_rows=64)
    for ours, other in zip(engine.generate(params, [request]), plain, strict=True):
        np.testing.assert_array_equal(ours.tokens.ids, other.tokens.ids)
    assert 0 < engine.guessing.passes <= engine.guessing.tokens
    # The plan of a run's memory has what the engine holds.
    rollout = dataclasses.replace(RL.rollout, mtp=True, guesses=3, guess_rows=64)
    told = sampler_memory(rollout, model, sampler_layout(rollout, model)).draft
    for ours, other in zip(*map(jax.tree.leaves, (engine.drafting, told)), strict=True):
        assert (ours.shape, ours.dtype) == (other.shape, other.dtype)


def test_a_layer_that_is_not_there_is_refused(model, save):
    with pytest.raises(ConfigError, match=r"--rollout.mtp: .*alone; got a llama"):
        engine_of(dataclasses.replace(model, name=save()), None, mtp=True)
    preset = dataclasses.replace(model, preset=True)
    with pytest.raises(ConfigError, match=r"--rollout.mtp: .* tiny is a preset"):
        engine_of(preset, None, mtp=True)
    apart = dataclasses.replace(
        RL,
        samplers="any:1",
        rollout=dataclasses.replace(RL.rollout, mtp=True, guesses=2, ahead=1),
    )
    with pytest.raises(ConfigError, match=r"--samplers any:1\) get the policy's"):
        check_options(apart)
    for options, told in (
        ({"mtp": True}, "--rollout.mtp: guesses --rollout.guesses tokens"),
        ({"mtp": True, "guesses": 2, "draft": "x"}, "--rollout.draft x guesses too"),
    ):
        rollout = dataclasses.replace(RL.rollout, **options)
        with pytest.raises(ConfigError, match=told):
            check_options(dataclasses.replace(RL, rollout=rollout))
