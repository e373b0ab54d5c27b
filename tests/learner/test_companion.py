"""An implicit reward model next to the policy; test_adapters.py has the critic's."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.reward_model import PrmConfig
from jaxrl_post.learner.adapters import with_adapter
from jaxrl_post.learner.algorithm import make_algorithm
from jaxrl_post.learner.companion import check_companion, open_companion
from jaxrl_post.learner.model import save_model
from jaxrl_post.pretrained.presets import PRESETS
from tests.learner.test_adapters import RANK4, batch_of, pointers, train, with_head


def graded():
    """Answers with outcomes, and a reference that finds all tokens alike."""
    batch = batch_of()
    return batch.replace(
        labels=(np.arange(batch.shape[0]) % 2)[:, None]
        * np.ones(batch.shape, np.float32),
        reference_logprobs=np.full(batch.shape, -4.0, np.float32),
    )


def objective():
    return make_algorithm(
        AlgorithmConfig(name="prime"), 16, prm=PrmConfig(beta=0.5)
    ).prm_objective


@pytest.mark.parametrize("policy", [AdapterConfig(), RANK4])
@pytest.mark.parametrize("own", [AdapterConfig(), RANK4])
def test_it_begins_as_the_policy(policy, own):
    model = with_adapter(policy, with_head("lm"), seed=0)
    prm = open_companion(PrmConfig(lora=own), model, seed=0, longest=32)
    assert prm.config.head == "lm"
    learner, _, _ = train(prm, objective(), graded(), steps=1)
    prm = open_companion(PrmConfig(lora=own), model, seed=0, longest=32)
    said = learner.scorer.predict(prm.whole(prm.params), batch_of()).logprobs
    told = learner.scorer.predict(model.whole(model.params), batch_of()).logprobs
    np.testing.assert_allclose(said, told, atol=1e-6)
    assert not pointers(prm.params) & pointers((model.base, model.params))
    shared = bool(pointers(prm.base) & pointers(model.base))
    assert shared == bool(policy.rank and own.rank)


def test_adapters_of_one_seed_begin_apart():
    model = with_adapter(RANK4, with_head("lm"), seed=0)
    prm = open_companion(PrmConfig(lora=RANK4), model, seed=0, longest=32)
    downs = [m.params["layers.0.mlp.up"].down for m in (model, prm)]
    assert np.abs(downs[0] - downs[1]).max() > 0.01
    assert model.adaptation.seed != prm.adaptation.seed


@pytest.mark.parametrize("own", [AdapterConfig(), RANK4])
def test_its_steps_leave_the_policy_as_it_is(own):
    model = with_adapter(RANK4, with_head("lm"), seed=0)
    before = jax.tree.map(np.asarray, (model.base, model.params))
    prm = open_companion(PrmConfig(lora=own), model, seed=0, longest=32)
    _, _, seen = train(prm, objective(), graded(), steps=4)
    assert seen[-1]["train/loss"] < seen[0]["train/loss"]
    jax.tree.map(np.testing.assert_array_equal, (model.base, model.params), before)


@pytest.mark.meshes
@pytest.mark.parametrize("own", [AdapterConfig(), RANK4])
def test_meshes_agree(own):
    found = []
    for mesh, count in (("dp1", 1), ("dp2,fsdp2,tp2", 8)):
        model = with_adapter(own, with_head("lm", mesh, count), seed=0)
        prm = open_companion(PrmConfig(lora=own), model, seed=0, longest=32)
        _, _, seen = train(prm, objective(), graded(), steps=3)
        names = "train/loss", "train/grad_norm", "prm/answer_reward"
        found.append([[each[name] for name in names] for each in seen])
    assert found[0][2][0] < found[0][0][0]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_it_may_begin_as_another_language_model(tmp_path):
    model, value = with_head("lm"), with_head("value")
    save_model(tmp_path / "lm", model, model.params)
    save_model(tmp_path / "rm", value, value.params)
    prm = open_companion(
        PrmConfig(model=str(tmp_path / "lm")), model, seed=0, longest=32
    )
    jax.tree.map(np.testing.assert_array_equal, prm.params, model.params)
    assert not pointers(prm.params) & pointers(model.params)
    options = PrmConfig(model=str(tmp_path / "rm"))
    with pytest.raises(ConfigError, match=r"--prm\.model: .*rm is a reward model with"):
        open_companion(options, model, seed=0, longest=32)


@pytest.mark.parametrize(
    ("policy", "own", "message"),
    [
        (
            {"rank": 2, "quantize": "int8"},
            {},
            r"--lora\.quantize: an implicit reward model begins as a copy .*--prm\.lo",
        ),
        (
            {"rank": 2},
            {"rank": 2, "quantize": "int8"},
            r"--prm\.lora\.quantize: .* are not quantised; got int8\. Drop",
        ),
        (
            {"rank": 2, "path": "adapter"},
            {"rank": 2},
            r"--prm\.lora\.rank: a new adapter begins as the base, .* --prm\.model",
        ),
        ({}, {"alpha": 2.0}, r"--prm\.lora\.\*: has no effect with a rank of 0"),
        ({}, {"rank": 2, "targets": ("kv_up",)}, r"--prm\.lora\.\*: .*no layer of"),
    ],
)
def test_options_that_contradict_are_refused(policy, own, message):
    prm = PrmConfig(lora=AdapterConfig(**own))
    with pytest.raises(ConfigError, match=message):
        check_companion(prm, AdapterConfig(**policy), with_head("lm"))


def test_a_policy_that_sees_is_refused():
    seeing = next(each for each in PRESETS.values() if each.vision is not None)
    model = dataclasses.replace(with_head("lm"), config=seeing)
    with pytest.raises(ConfigError, match="--vision: an implicit reward model reads t"):
        check_companion(PrmConfig(), AdapterConfig(), model)
