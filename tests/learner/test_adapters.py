"""Runs that train an adapter: what moves, what stays, what is saved."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_post import algorithms, models, pretrained
from jaxrl_post.algorithms import supervised
from jaxrl_post.algorithms.reward_model import bradley_terry
from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import UpdateConfig
from jaxrl_post.data import packing
from jaxrl_post.learner.adapters import lora_of, with_adapter
from jaxrl_post.learner.algorithm import make_algorithm
from jaxrl_post.learner.companion import check_companion, open_companion
from jaxrl_post.learner.learner import begin_training
from jaxrl_post.learner.memory import layout_table
from jaxrl_post.learner.model import save_model
from jaxrl_post.learner.reference import open_reference
from jaxrl_post.learner.state import make_optimizer
from jaxrl_post.models.adapters.lora import merged
from jaxrl_post.models.matrix import matrices
from jaxrl_post.pretrained.peft.files import load_adapter
from jaxrl_post.rollout.weights import buffer_pointers
from jaxrl_post.sharding import create_mesh, per_device_bytes
from tests import tiny
from tests.learner.test_learner import sequences
from tests.pretrained.checkpoints import edit_config
from tests.programs.trainers import make_model

RANK4 = AdapterConfig(rank=4, alpha=8.0)


@functools.cache
def some_model():
    """Two layers, for two stages. Made once: its arrays are donated to nothing."""
    model = make_model()
    config = dataclasses.replace(model.config, num_layers=2)
    return dataclasses.replace(
        model,
        config=config,
        specs=models.param_specs(config),
        params=tiny.params(config),
    )


@pytest.fixture(autouse=True)
def one_device():
    """Models are made on one device, even if a test set a mesh before."""
    before = jax.sharding.get_mesh()
    jax.set_mesh(create_mesh("dp1", jax.devices()[:1]))
    yield
    jax.set_mesh(before)


def batch_of():
    made = packing.pack([(each,) for each in sequences()], 32, 16)
    return made.replace(tokens=made.tokens % 64)


def begin(config, mesh="dp1", count=1):
    model = some_model()
    grid = create_mesh(mesh, jax.devices()[:count])
    jax.set_mesh(grid)
    params = models.initialize(jax.random.key(0), model.specs, jnp.float32, grid)
    model = dataclasses.replace(model, params=params, mesh=grid, preset=True)
    model = with_adapter(config, model, seed=0)
    learner, state = begin_training(
        model,
        algorithms.grpo(kl_coefficient=0.1).objective,
        OptimizerConfig(learning_rate=1e-2),
        UpdateConfig(microbatch_tokens=512),
        num_steps=10,
    )
    return model, learner, state


def scored(batch, model, learner, state):
    reference = open_reference(
        model, learner, None, "--algorithm.reference", longest=32
    )
    found = reference.scorer.predict(reference.params, batch)
    return batch.replace(reference_logprobs=found.logprobs), reference


@pytest.mark.parametrize(
    "config",
    [
        RANK4,
        dataclasses.replace(RANK4, dora=True, rank_stabilized=True),
        dataclasses.replace(RANK4, quantize="int8"),
    ],
    ids=["lora", "dora", "int8"],
)
def test_only_the_adapter_moves_and_the_reference_is_the_base(config):
    model, learner, state = begin(config)
    before = jax.tree.map(np.asarray, model.base)
    pointers = buffer_pointers(model.base)
    batch, reference = scored(batch_of(), model, learner, state)
    assert buffer_pointers(reference.params) == pointers
    # At the start the policy is its reference.
    own = learner.scorer.predict(model.whole(state.params), batch)
    np.testing.assert_allclose(
        own.logprobs, batch.reference_logprobs, rtol=1e-5, atol=1e-5
    )
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state))
    assert moments <= 2 * size + 2 < model.num_parameters
    losses = []
    for number in range(4):
        state, metrics = learner.update(state, batch, where=f"step {number}")
        losses.append(metrics["train/loss"])
    assert losses[-1] < losses[0]
    assert buffer_pointers(model.base) == pointers
    jax.tree.map(np.testing.assert_array_equal, model.base, before)
    # The sampler gets the base's own arrays, and what the trainer scores.
    whole = model.whole(state.params)
    assert set(pointers) <= set(buffer_pointers(whole))
    again = learner.scorer.predict(whole, batch)
    change = np.asarray(again.logprobs) - np.asarray(own.logprobs)
    assert np.abs(change).max() > 1e-3


@pytest.mark.meshes
def test_meshes_agree():
    results = []
    for mesh, count in (("dp1", 1), ("dp2,fsdp2,tp2", 8), ("pp2,dp2,tp2", 8)):
        model, learner, state = begin(RANK4, mesh, count)
        batch, _ = scored(batch_of(), model, learner, state)
        state, first = learner.update(state, batch, where="step 1")
        state, second = learner.update(state, batch, where="step 2")
        results.append((first["train/grad_norm"], second["train/loss"]))
    np.testing.assert_allclose(results, [results[0]] * 3, rtol=1e-4)


def test_the_model_is_saved_merged_and_the_adapter_by_itself(tmp_path):
    model, learner, state = begin(RANK4)
    batch, _ = scored(batch_of(), model, learner, state)
    state, _ = learner.update(state, batch, where="step 1")
    save_model(tmp_path / "model", model, state.params)
    config, found = pretrained.load(tmp_path / "model")
    lora = model.adaptation.lora
    expected = merged(model.base, state.params, model.config, lora)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    same, adapter = load_adapter(tmp_path / "adapter", config)
    assert (same.rank, same.alpha) == (4, 8.0)
    jax.tree.map(np.testing.assert_array_equal, adapter, state.params)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AdapterConfig(alpha=3.0), "has no effect with a rank of 0; give --lora.rank"),
        (
            AdapterConfig(rank=2, targets=("router",)),
            r"--lora\.\*: .*no layer of this llama has a mat",
        ),
        (AdapterConfig(rank=2, targets=("kv_up",)), r"no layer of this llama has"),
    ],
)
def test_options_that_make_no_sense_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        with_adapter(config, some_model(), seed=0)


# Heads, which are trained whole.


def with_head(head, mesh="dp1", count=1, dtype=jnp.float32):
    """A model whose numbers are all random, the head's too."""
    model = some_model()
    config = dataclasses.replace(model.config, head=head)
    grid = create_mesh(mesh, jax.devices()[:count])
    jax.set_mesh(grid)
    return dataclasses.replace(
        model,
        config=config,
        specs=models.param_specs(config),
        params=tiny.params(config, dtype=dtype, mesh=grid),
        mesh=grid,
        preset=True,
    )


def train(model, objective, batch, *, steps=3):
    learner, state = begin_training(
        model,
        objective,
        OptimizerConfig(learning_rate=1e-2),
        UpdateConfig(microbatch_tokens=512),
        num_steps=10,
    )
    seen = []
    for number in range(steps):
        state, metrics = learner.update(state, batch, where=f"step {number}")
        seen.append(metrics)
    return learner, state, seen


def pairs():
    """Two answers to a prompt, side by side in a row."""
    many = [
        dataclasses.replace(
            each, labels=np.full(len(each.tokens), 1.0 - 2 * (i % 2), np.float32)
        )
        for i, each in enumerate(sequences())
    ]
    both = list(zip(many[::2], many[1::2], strict=True))
    made = packing.pack(both, 32, 16)
    return made.replace(
        tokens=made.tokens % 64, advantages=np.zeros_like(made.advantages)
    )


def of_a_critic(batch):
    """Values of before the update, and returns to learn."""
    zeros = np.zeros(batch.shape, np.float32)
    return batch.replace(values_before=zeros, returns=zeros + 1.0)


def ppo(**critic):
    return make_algorithm(AlgorithmConfig(name="ppo"), 16, CriticConfig(**critic))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reward_model_trains_its_head_whole_and_the_rest_by_an_adapter(dtype):
    model = with_adapter(RANK4, with_head("value", dtype=jnp.dtype(dtype)), seed=0)
    assert model.adaptation.lora.whole == ("value_head",)
    before = jax.tree.map(np.asarray, model.base)
    head = np.array(model.params["value_head"].weight)
    learner, state, seen = train(model, bradley_terry(), pairs(), steps=4)
    assert seen[-1]["train/loss"] < seen[0]["train/loss"]
    # Moments and master weights of the adapter and its head, of nothing else.
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * size < model.num_parameters
    assert state.master is None
    assert np.abs(state.params["value_head"].weight - head).max() > 1e-3
    jax.tree.map(np.testing.assert_array_equal, model.base, before)
    whole = model.whole(state.params)
    assert whole.value_head.dtype == dtype
    assert learner.scorer.predict(whole, pairs()).values_after.dtype == np.float32


@pytest.mark.meshes
def test_meshes_agree_on_a_head():
    config = dataclasses.replace(RANK4, quantize="int8")
    found = []
    for mesh, count in (("dp1", 1), ("dp2,fsdp2,tp2", 8), ("pp2,fsdp2,tp2", 8)):
        model = with_adapter(config, with_head("value", mesh, count), seed=0)
        _, _, seen = train(model, bradley_terry(), pairs(), steps=2)
        found.append((seen[0]["train/grad_norm"], seen[1]["train/loss"]))
    np.testing.assert_allclose(found, [found[0]] * 3, rtol=1e-4)


def test_weight_decay_takes_from_a_head_with_an_adapter_and_without():
    for config in (AdapterConfig(), RANK4):
        model = with_adapter(config, with_head("value"), seed=0)
        options = OptimizerConfig(learning_rate=1.0, weight_decay=0.5)
        optimizer = make_optimizer(options, model.specs, 1)
        zeros = jax.tree.map(np.zeros_like, model.params)
        with jax.numpy_dtype_promotion("standard"):
            state = optimizer.init(model.params)
            changes, _ = optimizer.update(zeros, state, model.params)
        decayed = optax.apply_updates(model.params, changes)
        before, after = model.whole(model.params), model.whole(decayed)
        half = 0.5 * np.asarray(before.value_head)
        np.testing.assert_allclose(after.value_head, half)
        np.testing.assert_array_equal(after.final_norm, before.final_norm)


def test_a_reward_model_is_saved_merged_and_the_adapter_for_peft(tmp_path):
    model = with_adapter(RANK4, with_head("value"), seed=0)
    _, state, _ = train(model, bradley_terry(), pairs(), steps=1)
    save_model(tmp_path / "model", model, state.params)
    config, found = pretrained.load(tmp_path / "model")
    assert config.head == "value"
    np.testing.assert_array_equal(found.value_head, state.params["value_head"].weight)
    lora, adapter = load_adapter(tmp_path / "adapter", config)
    assert lora.whole == ("value_head",)
    jax.tree.map(np.testing.assert_array_equal, adapter, state.params)


def test_a_shared_backbone_is_an_adapter_with_a_value_head(tmp_path):
    model = with_adapter(RANK4, with_head("lm+value"), seed=0)
    head = np.array(model.params["value_head"].weight)
    up = np.array(model.params["layers.0.mlp.up"].up)
    objective = ppo(backbone="shared").objective
    _, state, seen = train(model, objective, of_a_critic(batch_of()))
    assert seen[-1]["critic/loss"] < seen[0]["critic/loss"]
    assert np.abs(state.params["value_head"].weight - head).max() > 1e-3
    assert np.abs(state.params["layers.0.mlp.up"].up - up).max() > 1e-3
    # The policy alone is saved, and its adapter.
    save_model(tmp_path / "model", model, state.params)
    config, found = pretrained.load(tmp_path / "model")
    assert (config.head, found.value_head) == ("lm", None)
    lora, adapter = load_adapter(tmp_path / "adapter", config)
    assert lora.whole == ()
    assert adapter.keys() == state.params.keys() - {"value_head"}
    whole = model.whole(state.params)
    np.testing.assert_allclose(
        found.layers[0].mlp.up, whole.layers[0].mlp.up.dense(jnp.float32), rtol=1e-6
    )


# A critic of its own.


def pointers(tree):
    return set(buffer_pointers(tree))


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_two_adapters_stand_on_one_base(quantize):
    lora = dataclasses.replace(RANK4, quantize=quantize)
    model = with_adapter(lora, with_head("lm"), seed=0)
    critic = open_companion(CriticConfig(lora=lora), model, seed=1, longest=32)
    # Only the value head is new: of the trained and of the frozen tree.
    new = pointers(critic.base) - pointers(model.base)
    assert new == pointers(critic.base.value_head)
    assert critic.base.unembedding is None
    assert not pointers(critic.params) & pointers((critic.base, model.params))
    assert not critic.params["value_head"].weight.any()
    downs = [m.params["layers.0.mlp.up"].down for m in (model, critic)]
    assert np.abs(downs[0] - downs[1]).max() > 0.01


def test_neither_adapter_s_steps_change_the_base():
    model = with_adapter(RANK4, with_head("lm"), seed=0)
    critic = open_companion(CriticConfig(lora=RANK4), model, seed=1, longest=32)
    before = jax.tree.map(np.asarray, model.base)
    batch, made = of_a_critic(batch_of()), ppo()
    _, state, seen = train(critic, made.value_objective, batch)
    assert seen[-1]["train/loss"] < seen[0]["train/loss"]
    assert np.abs(state.params["value_head"].weight).max() > 1e-3
    train(model, made.objective, batch, steps=1)
    jax.tree.map(np.testing.assert_array_equal, model.base, before)
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * size < critic.num_parameters


@pytest.mark.parametrize(
    ("policy", "critic"), [(AdapterConfig(), RANK4), (RANK4, AdapterConfig())]
)
def test_who_trains_whole_has_arrays_of_its_own(policy, critic):
    """The first optimizer step of either takes them."""
    model = with_adapter(policy, with_head("lm"), seed=0)
    value_model = open_companion(CriticConfig(lora=critic), model, seed=1, longest=32)
    assert not pointers(value_model.base) & pointers(model.base)


def test_an_adapter_over_a_reward_model_of_a_directory(tmp_path):
    begins = with_head("value")
    save_model(tmp_path / "rm", begins, begins.params)
    model = with_adapter(RANK4, with_head("lm"), seed=0)
    config = CriticConfig(model=str(tmp_path / "rm"), lora=RANK4)
    critic = open_companion(config, model, seed=0, longest=32)
    head = critic.params["value_head"].weight
    np.testing.assert_array_equal(head, begins.params.value_head)
    assert not pointers(critic.base) & pointers(model.base)
    save_model(tmp_path / "critic", critic, critic.params, adapter="critic_adapter")
    raw = json.loads((tmp_path / "critic_adapter/adapter_config.json").read_text())
    assert raw["base_model_name_or_path"] == str(tmp_path / "rm")
    assert (raw["task_type"], raw["modules_to_save"]) == ("SEQ_CLS", ["score"])


def test_an_adapter_over_a_text_model_names_no_larger_model_as_its_base(tmp_path):
    """In which PEFT would look for modules of other names."""
    plain = with_head("lm")
    save_model(tmp_path / "base", plain, plain.params)
    model = with_adapter(RANK4, plain, seed=0)
    opened = dataclasses.replace(model, name=str(tmp_path / "base"), preset=False)
    for family, base in (("llama", opened.name), ("mistral3", None)):
        edit_config(tmp_path / "base", model_type=family)
        save_model(tmp_path / "saved", opened, opened.params)
        raw = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
        assert raw["base_model_name_or_path"] == base


def test_the_layout_counts_a_shared_base_once():
    model = with_adapter(RANK4, with_head("lm"), seed=0)
    critic = open_companion(CriticConfig(lora=RANK4), model, seed=1, longest=32)
    rows = layout_table(
        model, UpdateConfig(), rows=1, row_tokens=8, optimizer=(),
        reference=model.base, companions={"critic": (critic.params, critic.base)},
    )  # fmt: skip
    shown = {name: mib for name, _, mib in rows}
    # The reference is the base alone, and of the critic's only the head is new.
    assert "reference" not in shown
    new = per_device_bytes((critic.params, critic.base.value_head))
    assert shown["critic"] == f"{new / 2**20:,.1f}"
    assert new < per_device_bytes(model.base)


def test_a_quantised_base_takes_the_place_of_the_arrays():
    """A run keeps the model that it opened: only what is freed saves memory."""
    opened = with_head("lm")
    before = matrices(opened.params)
    model = with_adapter(
        dataclasses.replace(RANK4, quantize="int8"), opened, seed=0, donate=True
    )
    assert before.keys() == matrices(model.base).keys()
    assert all(leaf.is_deleted() for leaf in before.values())
    # Leaves that are no matrix are shared.
    assert model.base.embedding is opened.params.embedding
    train(model, supervised.next_token, batch_of(), steps=1)


@pytest.mark.parametrize(
    ("policy", "critic", "message"),
    [
        (
            {},
            {"alpha": 2.0},
            r"--critic\.lora\.\*: has no effect .* --critic\.lora\.ra",
        ),
        ({}, {"rank": 2, "targets": ("kv_up",)}, r"--critic\.lora\.\*: .*no layer of"),
        (
            {"rank": 2, "quantize": "nf4"},
            {},
            r"--lora\.quantize: a critic of its own be",
        ),
        (
            {"rank": 2, "quantize": "nf4"},
            {"rank": 2, "quantize": "int8"},
            r"--critic\.lora\.quantize: .* shares .* which are nf4; got int8\. Drop",
        ),
        (
            {"rank": 2},
            {"rank": 2, "quantize": "int8"},
            r"--critic\.lora\.quantize: .* are not quantised; got int8\. Drop",
        ),
    ],
)
def test_options_of_a_critic_that_contradict_are_refused(policy, critic, message):
    config = RLConfig(
        algorithm=AlgorithmConfig(name="ppo"),
        critic=CriticConfig(lora=AdapterConfig(**critic)),
        lora=AdapterConfig(**policy),
    )
    with pytest.raises(ConfigError, match=message):
        check_companion(config.critic, config.lora, with_head("lm"))


def test_a_critic_that_could_not_be_saved_is_refused_at_once():
    model = with_head("lm")
    granite = dataclasses.replace(model.config, model_type="granite", qkv_bias=False)
    config = RLConfig(algorithm=AlgorithmConfig(name="ppo"))
    with pytest.raises(
        pretrained.CheckpointError, match="no sequence classifier of granite"
    ):
        check_companion(
            config.critic, config.lora, dataclasses.replace(model, config=granite)
        )


@pytest.mark.parametrize("dora", [False, True])
def test_over_a_quantised_base_it_changes_nothing_yet_either(dora):
    """DoRA divides by the norms of what is multiplied with: of the quantised base."""
    config = dataclasses.replace(RANK4, quantize="int8", dora=dora)
    model, learner, state = begin(config)
    batch = batch_of()
    base = learner.scorer.predict(model.base, batch).logprobs
    policy = learner.scorer.predict(model.whole(state.params), batch).logprobs
    np.testing.assert_allclose(policy, base, atol=2e-6)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            AdapterConfig(rank=2, dora=True, targets=("query", "value")),
            {"model_type": "phi3", "qkv_bias": False, "tie_embeddings": False},
            r"--lora\.\*: adapter: .*query.* are one matrix in phi3 .* all of which",
        ),
        (
            AdapterConfig(rank=2, quantize="nf4"),
            {"hidden_size": 48, "intermediate_size": 80, "head_dim": 12},
            r"--lora\.quantize: nf4 does not fit this model: .* use int8",
        ),
    ],
)
def test_what_would_fail_at_the_end_is_refused_at_once(config, changes, message):
    architecture = dataclasses.replace(some_model().config, **changes)
    with pytest.raises(ConfigError, match=message):
        lora_of(config, architecture)


def test_all_of_latent_attention_is_adapted_by_default():
    latent = models.LatentAttention(16, 8, 8, 8, 12)
    config = models.ModelConfig(
        "deepseek_v3", 64, 32, 48, 1, num_heads=2, num_kv_heads=2, latent=latent
    )
    found = lora_of(AdapterConfig(rank=2), config)
    assert set(found.targets) == {
        "query_down", "query_up", "kv_down", "kv_up", "output", "gate", "up", "down",
    }  # fmt: skip


def test_an_adapter_over_exchanged_labels_is_refused(tmp_path):
    model = with_head("process")
    save_model(tmp_path / "rm", model, model.params)
    file = tmp_path / "rm" / "config.json"
    raw = json.loads(file.read_text()) | {"id2label": {"0": "good", "1": "bad"}}
    file.write_text(json.dumps(raw))
    model = dataclasses.replace(model, name=str(tmp_path / "rm"), preset=False)
    with pytest.raises(ConfigError, match=r"--lora\.rank: label 0 of .* means right"):
        with_adapter(RANK4, model, seed=0)
