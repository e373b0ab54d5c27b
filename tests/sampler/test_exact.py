"""Exact mode: recorded log-probs are the trainer's, to the last bit."""

import contextlib
import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.data.packing import Sequence, pack, trees
from jaxrl_post.learner.step import Policy, predict
from jaxrl_post.mesh_spec import read_mesh
from jaxrl_post.models import (
    GatedDelta,
    HeadSpec,
    LatentAttention,
    LayerSpec,
    Mamba2,
    MixtureOfExperts,
    PerLayerEmbedding,
    RopeScaling,
    ShortConvolution,
    forward,
)
from jaxrl_post.models.adapters.lora import (
    LoRAConfig,
    adaptable,
    adapted,
    initialize_adapter,
)
from jaxrl_post.models.exact import check_exact, exact_forward
from jaxrl_post.models.layer import LayerValues
from jaxrl_post.models.matrix import EXPERTS
from jaxrl_post.models.rope import yarn_mscale
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sharding import create_mesh, place
from jaxrl_post.tokens import Tokens
from tests import tiny

# Few shapes, so that few programs are compiled; twice as many samples as slots.
TILE = 32
SIZES = EngineConfig(
    num_slots=8,
    max_prompt_tokens=64,
    max_tokens=32,
    steps_per_call=32,
    prefill_tokens=16,
    max_stop_ids=2,
    kept_ids=4,
)
DENSE = dataclasses.replace(tiny.CONFIG, max_length=128)
FAMILIES = {
    "dense": DENSE,
    "experts": dataclasses.replace(
        DENSE,
        model_type="qwen3_moe",
        experts=MixtureOfExperts(
            num_experts=8,
            experts_per_token=2,
            expert_size=24,
            biases=True,
            shared_size=8,
            shared_gate=True,
        ),
    ),
    "windows": dataclasses.replace(
        DENSE,
        layers=(LayerSpec(window=20), LayerSpec()),
        attention_softcap=20.0,
        logit_softcap=15.0,
        norm_plus_one=True,
        embedding_scale=4.0,
    ),
    # Queries without a latent of their own; one layer compiles in half the time.
    "latent": dataclasses.replace(
        DENSE,
        model_type="youtu",
        num_layers=1,
        num_kv_heads=8,
        head_dim=8,
        latent=LatentAttention(kv_rank=12, nope_dim=4, rope_dim=4, value_dim=6),
        qkv_bias=True,
        output_bias=True,
        tie_embeddings=True,
    ),
    # As DeepSeek-V3, with a dense layer first.
    "latent_experts": dataclasses.replace(
        DENSE,
        model_type="deepseek_v3",
        num_kv_heads=8,
        head_dim=8,
        latent=LatentAttention(12, nope_dim=4, rope_dim=4, value_dim=6, query_rank=10),
        rope_interleaved=True,
        rope_scaling=RopeScaling(
            "yarn", factor=4.0, original_length=32, mscale=1.0, mscale_all_dim=1.0
        ),
        attention_scale=8**-0.5 * yarn_mscale(4.0, 1.0) ** 2,
        experts=MixtureOfExperts(
            num_experts=8,
            experts_per_token=2,
            expert_size=24,
            scoring="sigmoid",
            scale=2.5,
            num_groups=4,
            groups_per_token=2,
            group_score="top2",
            correction_bias=True,
            shared_size=8,
        ),
        layers=(LayerSpec(), LayerSpec(mlp="experts")),
    ),
    # As LFM2 with experts: states, and one layer with keys between them.
    "convolutions": dataclasses.replace(
        DENSE,
        model_type="lfm2_moe",
        num_layers=3,
        qk_norm="head",
        tie_embeddings=True,
        recurrence=ShortConvolution(kernel=3, bias=True),
        layers=(
            LayerSpec("recurrence"),
            LayerSpec("attention"),
            LayerSpec("recurrence", "experts"),
        ),
        experts=MixtureOfExperts(
            num_experts=8,
            experts_per_token=2,
            expert_size=24,
            scoring="sigmoid",
            correction_bias=True,
        ),
    ),
    # As Nemotron-H: layers of Mamba-2, attention and experts alone.
    "mamba": dataclasses.replace(
        DENSE,
        model_type="nemotron_h",
        num_layers=5,
        activation="relu2",
        recurrence=Mamba2(
            kernel=4,
            key_heads=8,
            value_heads=16,
            key_dim=6,
            value_dim=4,
        ),
        experts=MixtureOfExperts(
            num_experts=8,
            experts_per_token=2,
            expert_size=24,
            scoring="sigmoid",
            correction_bias=True,
            shared_size=8,
            latent_size=12,
        ),
        layers=(
            LayerSpec("recurrence", None),
            LayerSpec(None, "experts"),
            LayerSpec("attention", None, rotated=False),
            LayerSpec("recurrence", None),
            LayerSpec(None, "dense"),
        ),
    ),
    # As Gemma 4, with all of its parts: layers that read the keys of others, heads of
    # two sizes, experts next to an MLP, embeddings for every layer.
    "shared_keys": dataclasses.replace(
        DENSE,
        model_type="gemma4_text",
        num_layers=4,
        qk_norm="head",
        value_norm=True,
        layer_scale=True,
        attention_scale=1.0,
        norm_placement="both",
        activation="gelu_tanh",
        local_rope_theta=20.0,
        # A norm blows up an output of nearly 0 and what rounding added to it.
        rms_norm_eps=0.01,
        tie_embeddings=True,
        logit_softcap=15.0,
        per_layer=PerLayerEmbedding(40, 16),
        experts=MixtureOfExperts(
            num_experts=8, experts_per_token=2, expert_size=24, scaled_router=True
        ),
        layers=(
            LayerSpec(mlp="both", window=20),
            LayerSpec(heads=HeadSpec(8, 2, rotary_share=0.5, keys_as_values=True)),
            LayerSpec(mlp="both", window=20, keys_of=0, mlp_multiple=2),
            LayerSpec(
                heads=HeadSpec(8, 2, rotary_share=0.5, keys_as_values=True), keys_of=1
            ),
        ),
    ),
    # As Qwen3.5 with experts: delta nets, and gated attention between them.
    "delta": dataclasses.replace(
        DENSE,
        model_type="qwen3_5_moe_text",
        num_layers=3,
        qk_norm="head",
        norm_plus_one=True,
        attention_gate=True,
        rotary_dim=2,
        recurrence=GatedDelta(
            kernel=4,
            key_heads=8,
            value_heads=16,
            key_dim=6,
            value_dim=4,
        ),
        layers=(
            LayerSpec("recurrence", "experts"),
            LayerSpec("attention", "experts"),
            LayerSpec("recurrence", "experts"),
        ),
        experts=MixtureOfExperts(
            num_experts=8,
            experts_per_token=2,
            expert_size=24,
            shared_size=8,
            shared_gate=True,
        ),
    ),
}
# A bias for every sum over the parts of devices.
BIASES = dataclasses.replace(
    FAMILIES["experts"],
    output_bias=True,
    mlp_bias=True,
    layers=(LayerSpec(mlp="experts"), LayerSpec(mlp="dense")),
)
SYSTEM = tuple(np.random.default_rng(7).integers(0, 40, 21).tolist())
REPLY = (7, 8, 9)
TEMPERATURE = 0.9


def prompt(number, length):
    rng = np.random.default_rng([number, length])
    own = tuple(rng.integers(0, 40, length).tolist())
    # Prompt 3 begins differently from the others.
    return own if number == 3 else SYSTEM + own


def with_adapter(params, config, mesh):
    """The parameters under a LoRA adapter whose B is not zero."""
    targets = tuple(name for name in adaptable(config) if name not in EXPERTS)
    lora = LoRAConfig(rank=3, targets=targets)
    key = jax.random.key(1)
    adapter = initialize_adapter(key, params, config, lora, mesh=mesh)
    moved = jax.tree.map(lambda leaf: leaf + 0.1 * jnp.sin(7 + leaf), adapter)
    return adapted(params, moved, config, lora)


def conversations(config, dtype, mesh, *, exact, adapter=False, top_p=1.0):
    """Ragged answers to prompts of 1 to 61 tokens, some of them in a second turn.

    Samples are more than slots, so that slots, pages and prefixes are used again, and
    the cache begins with NaN wherever nothing has been written.
    """
    params = tiny.params(config, dtype=dtype, mesh=mesh)
    if adapter:
        params = with_adapter(params, config, mesh)
    sizes = dataclasses.replace(SIZES, exact=TILE if exact else 0)
    engine = Engine(config, sizes, dtype=dtype, mesh=mesh)
    engine._pages = jax.tree.map(lambda leaf: leaf + jnp.nan, engine._pages)
    sampling = SamplingParams(TEMPERATURE, top_p=top_p, max_tokens=30, stop_ids=(3,))
    lengths = (3, 20, 40, 1)
    first = {number: prompt(number, length) for number, length in enumerate(lengths)}
    requests = [Request(n, ids, 4, sampling=sampling) for n, ids in first.items()]
    found = {}
    for done in engine.generate(params, requests):
        sampled = Tokens.context(first[done.prompt_id]) + done.tokens
        found[done.prompt_id, done.sample_index] = sampled
    second = [
        Request(number, (*tokens.ids.tolist(), *REPLY), 1, sample, sampling)
        for (number, sample), tokens in found.items()
        if len(tokens) + len(REPLY) <= SIZES.max_prompt_tokens and number in (0, 3)
    ]
    assert second
    for done in engine.generate(params, second):
        key = done.prompt_id, done.sample_index
        found[key] = found[key] + Tokens.context(REPLY) + done.tokens
    return params, list(found.values())


def scored(config, params, units, length, mesh, *, exact, gradient):
    """The trainer's log-probs of the sampled tokens, and the sampler's."""
    np.random.default_rng(1).shuffle(units)
    batch = pack(units, length, 4, kept_ids=SIZES.kept_ids)
    if mesh is not None:
        batch = place(batch, NamedSharding(mesh, P(("dp", "fsdp", "ep"))))
    policy = Policy(config, TEMPERATURE, exact=TILE if exact else 0)

    def run(params, batch):
        logprobs = predict(policy, params, batch).logprobs
        return jnp.square(logprobs).sum(), logprobs

    if gradient:
        run = jax.grad(run, has_aux=True)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        _, logprobs = jax.jit(run)(params, batch)
    mask = np.asarray(batch.loss_mask)
    return np.asarray(logprobs)[mask], np.asarray(batch.behavior_logprobs)[mask]


def check(config, dtype, spec=None, *, adapter=False, top_p=1.0):
    mesh = None
    if spec is not None:
        size = math.prod(read_mesh(spec).values())
        mesh = create_mesh(spec, jax.devices()[:size])
    params, sampled = conversations(
        config, dtype, mesh, exact=True, adapter=adapter, top_p=top_p
    )
    cut = np.concatenate([each.log_masses[each.sampled] < -0.01 for each in sampled])
    recorded = np.concatenate(
        [each.padded_kept(9)[each.sampled, 0] >= 0 for each in sampled]
    )
    # Some sets are recorded, some are too large to be.
    assert recorded.any() == (cut & ~recorded).any() == (top_p < 1)
    sequences = [Sequence(each, np.ones(len(each), np.float32)) for each in sampled]
    count = sum(int(each.sampled.sum()) for each in sampled)
    # Trees in the program that trains, and plain rows in the one that scores.
    for units, length, gradient in (
        (trees(sequences), 256, True),
        (sequences, 130, False),
    ):
        ours, recorded = scored(
            config, params, units, length, mesh, exact=True, gradient=gradient
        )
        assert len(ours) == count > 200
        np.testing.assert_array_equal(ours, recorded)


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("latent", None),
        ("latent_experts", None),
        ("shared_keys", None),
        # Each device adds a part of a sum, and one of them its bias.
        pytest.param("biases", "tp2", marks=pytest.mark.meshes),
        pytest.param("convolutions", "tp2", marks=pytest.mark.meshes),
    ],
)
def test_exact_mode_gives_what_the_form_of_training_gives(family, spec):
    """Both sides could agree and be wrong: latents have other products there."""
    config = {**FAMILIES, "biases": BIASES}[family]
    mesh = None if spec is None else create_mesh(spec, jax.devices()[:2])
    # Not seed 0, whose shared keys make a norm of nearly 0 of an output: there the
    # ordinary pass is 3 times the bound from a pass in float64.
    params = tiny.params(config, seed=2, mesh=mesh)
    rng = np.random.default_rng(0)
    units = [
        Sequence.of(SYSTEM, rng.integers(0, 40, count).tolist()) for count in (5, 30, 2)
    ]
    batch = pack(trees(units), 64, 1)

    @jax.jit
    def run(params, batch):
        paths = {"positions": batch.positions, "ends": batch.ends}
        counted = batch.ends > 0
        found, _ = exact_forward(
            params, config, batch.tokens, counted=counted, tile=TILE, **paths
        )
        return found, forward(params, config, batch.tokens, **paths)

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        both = jax.device_get(run(params, batch))
    found, expected = (each[batch.ends > 0] for each in both)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert (found != expected).any()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        # `test_on_meshes` has this family.
        pytest.param("dense", tiny.F32, marks=pytest.mark.all),
        ("windows", tiny.F32),
        pytest.param("experts", tiny.BF16, marks=pytest.mark.all),
        pytest.param("latent", tiny.F32, marks=pytest.mark.all),
        ("latent_experts", tiny.BF16),
        ("convolutions", tiny.F32),
        pytest.param("convolutions", tiny.BF16, marks=pytest.mark.all),
        ("delta", tiny.F32),
        pytest.param("delta", tiny.BF16, marks=pytest.mark.all),
        pytest.param("mamba", tiny.F32, marks=pytest.mark.all),
        pytest.param("mamba", tiny.BF16, marks=pytest.mark.all),
        # `test_exact_mode_gives_what_the_form_of_training_gives` has this family.
        pytest.param("shared_keys", tiny.F32, marks=pytest.mark.all),
        pytest.param("shared_keys", tiny.BF16, marks=pytest.mark.all),
    ],
    ids=str,
)
def test_every_recorded_logprob_is_the_trainers(family, dtype):
    check(FAMILIES[family], dtype, top_p=0.8 if family == "windows" else 1.0)


@pytest.mark.meshes
@pytest.mark.parametrize(
    ("family", "dtype", "spec"),
    [
        # The test above has these families, and those below these meshes.
        pytest.param("windows", tiny.BF16, "tp2", marks=pytest.mark.all),
        pytest.param("latent", tiny.BF16, "tp2", marks=pytest.mark.all),
        ("dense", tiny.BF16, "dp2,tp2"),
        pytest.param("experts", tiny.F32, "fsdp2,tp2", marks=pytest.mark.all),
    ],
    ids=str,
)
def test_on_meshes(family, dtype, spec):
    config = FAMILIES[family]
    # One layer compiles in half the time; `test_everywhere` has two.
    config = dataclasses.replace(config, num_layers=1, layers=config.layers[:1])
    adapter = family in ("dense", "latent")
    check(config, dtype, spec, adapter=adapter, top_p=0.8 if adapter else 1.0)


@pytest.mark.all
@pytest.mark.meshes
@pytest.mark.parametrize(
    "spec", [None, "tp2", "dp2,tp2", "fsdp2,tp2", "ep2,tp2", "tp8"]
)
@pytest.mark.parametrize("dtype", [tiny.F32, tiny.BF16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_everywhere(family, dtype, spec):
    check(FAMILIES[family], dtype, spec)


# Results of "latent" are also tested in
# `test_exact_mode_gives_what_the_form_of_training_gives`.
@pytest.mark.parametrize(
    "family",
    [
        "dense",
        *(
            pytest.param(family, marks=pytest.mark.all)
            for family in ("latent", "convolutions", "delta", "mamba")
        ),
    ],
)
def test_without_exact_mode_most_differ(family):
    """The control: the tests above can fail."""
    config = FAMILIES[family]
    params, sampled = conversations(config, tiny.F32, None, exact=False)
    sequences = [Sequence(each, np.ones(len(each), np.float32)) for each in sampled]
    ours, recorded = scored(
        config, params, trees(sequences), 256, None, exact=False, gradient=True
    )
    assert (ours == recorded).mean() < 0.9
    np.testing.assert_allclose(ours, recorded, atol=1e-4)


# Families, and how their layers are computed.
COMPUTED = [
    ("dense", {}),
    ("dense", {"remat": "full"}),
    ("dense", {"remat": "dots", "scan": True}),
    ("windows", {"scan": True, "remat": "full"}),
    ("shared_keys", {}),
    ("experts", {}),
    pytest.param("latent", {}, marks=pytest.mark.all),
    pytest.param("convolutions", {}, marks=pytest.mark.all),
    pytest.param("delta", {}, marks=pytest.mark.all),
    pytest.param("biases", {}, marks=pytest.mark.all),
]


# Rounding of two float32 passes, of models that are less well conditioned.
ROUNDING = {"shared_keys": 1e-4, "delta": 1e-4, "biases": 1e-5}


def gradients(config, units, **options):
    """Log-probs and gradient of a loss that is linear in them, of a policy."""
    batch = jax.tree.map(jnp.asarray, pack(units, 64, 1))

    def loss(params):
        policy = Policy(config, TEMPERATURE, **options)
        predictions = predict(policy, params, batch)
        assert predictions.logprobs is not None
        # Linear, so that the derivative by the log-probs is the same in both.
        weights = jnp.sin(jnp.arange(64, dtype=jnp.float32))
        total = (weights * predictions.logprobs).sum(where=batch.loss_mask)
        if predictions.regularizer is not None:
            total += predictions.regularizer
        return total, (predictions.logprobs, predictions.entropy)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_values_are_exact_and_the_gradient_is_that_of_the_model():
    turns = np.random.default_rng(0).integers(0, 40, 37).tolist()
    units = trees(
        [Sequence.of(SYSTEM, turn) for turn in (turns[:5], turns[5:35], turns[35:])]
    )
    (_, ours), found = gradients(tiny.CONFIG, units, exact=TILE)(tiny.shared())
    (_, plain), expected = gradients(tiny.CONFIG, units)(tiny.shared())
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert (ours[0] != plain[0]).any()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        found,
        expected,
    )


@pytest.mark.parametrize(("family", "how"), COMPUTED)
def test_the_gradient_is_that_of_every_model(family, how):
    config = {**FAMILIES, "biases": BIASES}[family]
    params = tiny.params(config)
    rng = np.random.default_rng(0)
    # A prompt with two answers, and padding at the end of the row.
    turns = [rng.integers(0, 40, count).tolist() for count in (5, 30, 2)]
    units = trees([Sequence.of(SYSTEM, turn) for turn in turns])
    if config.experts is not None:
        how = {**how, "router_balance": 0.1}
    (_, ours), found = gradients(config, units, exact=TILE, **how)(params)
    (_, plain), expected = gradients(config, units, **how)(params)
    rounding = ROUNDING.get(family, 2e-6)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, atol=10 * rounding)
    assert (ours[0] != plain[0]).any()
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=rounding * scale),
        found,
        expected,
    )


def test_what_exact_mode_computed_is_not_computed_again(monkeypatch):
    params = tiny.shared()
    units = [Sequence.of(SYSTEM, list(range(30)))]

    def products(names):
        monkeypatch.setattr(LayerValues, "_fields", names)
        run = gradients(tiny.CONFIG, units, exact=TILE)
        lines = run.lower(params).compile().as_text().splitlines()
        return sum(" dot(" in line or "ynn_fusion" in line for line in lines)

    fields = LayerValues._fields
    # Two layers with queries, keys, values, gate, up, and two outputs.
    assert products(()) - products(fields) >= 2 * 7


@pytest.mark.parametrize("tile", [8, 64])
def test_tiles_of_other_sizes_are_exact_too(tile, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TILE", tile)
    check(DENSE, tiny.F32)


def test_a_tile_is_not_a_switch():
    with pytest.raises(ValueError, match="EngineConfig: exact must be the rows of a"):
        EngineConfig(exact=True)
    with pytest.raises(
        ValueError, match=r"Policy: exact .* 0 for no exact mode; got 2"
    ):
        Policy(DENSE, exact=2)


@pytest.mark.parametrize(
    ("change", "parts", "why"),
    [
        (
            {"rope_scaling": RopeScaling("dynamic", factor=2.0, original_length=32)},
            1,
            "dynamic rotates a token by the length",
        ),
        ({"qk_norm": "joint"}, 2, "norms all heads together, and 2 devices"),
    ],
)
def test_refuses_models_that_cannot_be_exact(change, parts, why):
    with pytest.raises(ValueError, match=why):
        check_exact(dataclasses.replace(DENSE, **change), parts)
