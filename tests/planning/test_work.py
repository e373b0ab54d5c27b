"""FLOPs and bytes of a model's programs: published numbers, sums by hand, XLA's."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post import models
from jaxrl_post.algorithms import grpo
from jaxrl_post.kernels.token_logprob import tile_rows
from jaxrl_post.learner import step as pure
from jaxrl_post.learner.memory import activation_bytes
from jaxrl_post.models import GatedDelta, LayerSpec, Mamba2, ModelConfig
from jaxrl_post.models.config import LatentAttention, MixtureOfExperts
from jaxrl_post.pretrained.presets import PRESETS
from jaxrl_post.programs.planning.chips import CHIPS, Work
from jaxrl_post.programs.planning.work import ModelWork
from jaxrl_post.sampler import EngineConfig, Request, batches
from jaxrl_post.sampler.jitted import DeviceFunctions
from jaxrl_post.sampler.scheduler import Scheduler
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh
from jaxrl_post.sharding.stages import Schedule
from jaxrl_post.types import TokenBatch

BF16 = jnp.dtype("bfloat16")
DENSE = ModelConfig("llama", 512, 128, 256, 2, num_heads=8, num_kv_heads=4)
LATENT = ModelConfig(
    "deepseek_v3", 512, 128, 256, 2, num_heads=8, num_kv_heads=8,
    latent=LatentAttention(32, nope_dim=16, rope_dim=8, value_dim=16, query_rank=24),
)  # fmt: skip
EXPERTS = ModelConfig(
    "qwen3_moe", 512, 128, 256, 2, num_heads=8, num_kv_heads=4,
    experts=MixtureOfExperts(16, 2, expert_size=32, shared_size=64),
)  # fmt: skip


MAMBA = ModelConfig(
    "nemotron_h", 512, 128, 256, 2, num_heads=8, num_kv_heads=4, activation="relu2",
    recurrence=Mamba2(4, key_heads=2, value_heads=8, key_dim=32, value_dim=16),
    layers=(LayerSpec("recurrence", None), LayerSpec("attention")),
)  # fmt: skip


def work(config: ModelConfig, mesh: str = "dp1", dtype=BF16) -> ModelWork:
    made = create_mesh(mesh, jax.devices()[: 1 if mesh == "dp1" else 8])
    return ModelWork(config, made, DEFAULT_RULES, jnp.dtype(dtype))


def decoded(model: ModelWork, slots: int = 1, view: int = 0) -> Work:
    return model.decode(slots, view, 1)


def test_layers_that_read_the_keys_of_others_cost_no_cache_and_no_prefill():
    """Gemma 4 E2B: 12 and 3 layers with keys, of one head of 256 and 512 dims."""
    model = work(PRESETS["gemma-4-e2b"])
    assert model.cache_bytes == 2 * 2 * (12 * 256 + 3 * 512)
    # Readers are two thirds of the matrices, in wide MLPs.
    whole = model.accumulate(1, 1024, 0.0, "none", scan=False)
    assert model.prefill(1, 1024).flops < 0.25 * whole.flops


def test_tables_of_per_layer_embeddings_are_looked_up_and_kept():
    """Gemma 4 E2B: next to 262,144 x 1,536 entries, 35 layers have 256 each."""
    config = PRESETS["gemma-4-e2b"]
    widths = 1536 + 35 * 256
    assert work(config).table_bytes == 262_144 * widths * 4
    split = work(config, "fsdp8")
    assert split.table_bytes == 262_144 * widths * (4 + 2 * 2)
    # A layer keeps what it reads of them, next to the residual stream.
    sizes = {"tokens": 10, "itemsize": 2}
    kept = activation_bytes(config, split.mesh, remat="full", **sizes)
    without = dataclasses.replace(config, per_layer=None)
    less = activation_bytes(without, split.mesh, remat="full", **sizes)
    assert kept - less == 10 * 2 * 256 * (35 + 1)


@pytest.mark.parametrize(
    ("name", "matrices"),
    [
        # All parameters but the table that is looked up and the norms.
        ("llama-3.1-8b", 8_030_261_248 - 128256 * 4096 - 65 * 4096),
        # Tied: the table is the head's matrix. Norms, and biases of q, k and v.
        ("qwen2.5-1.5b", 1_543_714_304 - 57 * 1536 - 28 * (12 + 2 + 2) * 128),
        # "37B activated for each token" (arXiv:2412.19437), less the embedding: the
        # head, 3 dense layers, 58 of 8 + 1 experts, and attention.
        (
            "deepseek-v3",
            129280 * 7168
            + 3 * 3 * 7168 * 18432
            + 58 * (9 * 3 * 7168 * 2048 + 256 * 7168)
            + 61
            * (
                7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256
                + 128 * 128 * 7168
            ),
        ),
    ],
)  # fmt: skip
def test_a_token_costs_two_flops_per_parameter_in_its_products(name, matrices):
    assert decoded(work(PRESETS[name])).flops == 2 * matrices


def test_deepseek_activates_37_billion_parameters():
    billions = decoded(work(PRESETS["deepseek-v3"])).flops / 2e9
    embedding = 129280 * 7168 / 1e9
    assert billions + embedding == pytest.approx(37.5, abs=0.1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Layers x key/value heads x head dims x (key, value) x bfloat16.
        ("llama-3.1-8b", 32 * 8 * 128 * 2 * 2),
        ("llama-3.3-70b", 80 * 8 * 128 * 2 * 2),
        ("qwen3-30b-a3b", 48 * 4 * 128 * 2 * 2),
        # The latent and the rotated key: 70 kB.
        ("deepseek-v3", 61 * (512 + 64) * 2),
    ],
)
def test_bytes_of_a_token_in_the_cache(name, expected):
    assert work(PRESETS[name]).cache_bytes == expected


def test_bytes_of_a_token_in_a_cache_of_codes():
    model = dataclasses.replace(
        work(PRESETS["llama-3.1-8b"]), cache_dtype=jnp.dtype("int8")
    )
    # A byte for each, and float32 scales of key and value.
    assert model.cache_bytes == 32 * 8 * (128 + 4) * 2


def test_a_decoding_step_reads_a_byte_a_weight():
    whole = work(PRESETS["llama-3.1-8b"])
    codes = dataclasses.replace(whole, bytes_of_weights=True)
    # The matrices of the layers are all but embedding, head and norms.
    matrices = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096
    saved = whole.decode(8, 64, 2).bytes - codes.decode(8, 64, 2).bytes
    assert saved == 2 * matrices


def test_products_in_float8_take_half_the_time_where_a_chip_has_units_for_it():
    whole = work(PRESETS["llama-3.1-8b"])
    codes = dataclasses.replace(whole, bytes_of_weights=True, float8=True)
    one, other = (
        each.accumulate(8, 4096, 8 * 4096, "full", scan=False)
        for each in (whole, codes)
    )
    assert one.float8 == 0
    assert other.flops == one.flops
    # Attention and the head keep their dtype. Forward, again but for the last product
    # of a layer, and twice backward.
    matrices = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096
    passes = 4 * matrices - 32 * 14336 * 4096
    assert other.float8 == 2 * 8 * 4096 * passes
    h100, v5p = CHIPS["NVIDIA H100 80GB HBM3"], CHIPS["TPU v5"]
    saved = h100.times(one).compute - h100.times(other).compute
    assert saved == pytest.approx(other.float8 / 989.5e12 / 2)
    assert v5p.times(one).compute == pytest.approx(v5p.times(other).compute)


def test_a_decoding_step_reads_the_weights_and_the_cache_once():
    model = work(PRESETS["llama-3.1-8b"])
    weights = 2 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)
    rows, view = 64, 4096
    # 15.01 of 16.06 GB are in products; 131,072 bytes a token of the cache.
    cache = rows * (view + 1) * 131072
    # A burst copies the view out of the pages, and what it adds back.
    burst = 2 * rows * (view + 1) * 131072
    step = model.decode(rows, view, 1).bytes - burst
    # Inputs and outputs of the products are below three percent of the weights.
    assert weights + cache < step < 1.03 * weights + cache
    copied = 2 * rows * (view + 16) * 131072
    assert model.decode(rows, view, 16).bytes == 16 * step + copied
    # Shared entries of a group of eight are read once for it, and copied once.
    prompt = model.decode(rows, view, 1, groups=8, members=8, shared=512).bytes
    assert prompt - step - burst == 3 * 8 * 512 * 131072


def test_attention_costs_four_flops_per_head_dimension_and_key():
    model = work(DENSE)
    with_keys, without = decoded(model, 8, 100), decoded(model, 8)
    # Two products, each of two FLOPs: 8 slots, 8 heads of 16 dims, 2 layers.
    assert with_keys.flops - without.flops == 8 * 100 * 4 * 8 * 16 * 2


@pytest.mark.parametrize(
    ("recurrence", "products"),
    [
        # Queries and keys, values and gates, steps, outputs; a state that is read and
        # written.
        (MAMBA.recurrence, 128 * (2 * 64 + 2 * 128 + 8 + 128) + 8 * 2 * 32 * 16),
        # Decays and betas, too; a state is read twice.
        (
            GatedDelta(4, key_heads=2, value_heads=8, key_dim=32, value_dim=16),
            128 * (2 * 64 + 2 * 128 + 2 * 8 + 128) + 8 * 3 * 32 * 16,
        ),
    ],
)
def test_a_token_passes_through_the_states_of_its_layers(recurrence, products):
    config = dataclasses.replace(MAMBA, recurrence=recurrence)
    attention, head = 128 * (2 * 128 + 2 * 64), 512 * 128
    expected = products + attention + 2 * 128 * 256 + head
    assert decoded(work(config)).flops == 2 * expected


@pytest.mark.meshes
def test_a_device_computes_its_share():
    whole, split = work(DENSE), work(DENSE, "dp2,fsdp2,tp2")
    one, part = decoded(whole, 64, 128), decoded(split, 64, 128)
    assert part.flops == one.flops / 8
    # 4 key/value heads over tp2, slots over dp2 and fsdp2.
    assert split.cache_bytes == whole.cache_bytes / 2
    # With tp4 a model of 2 key/value heads has all of them on every device.
    few = ModelConfig("llama", 512, 128, 256, 2, num_heads=8, num_kv_heads=2)
    assert work(few, "dp2,tp4").cache_bytes == work(few).cache_bytes


@pytest.mark.meshes
def test_a_split_matrix_is_read_in_parts_written_and_read_whole():
    moved = decoded(work(DENSE, "dp2,fsdp4"), 8).bytes
    still = decoded(work(DENSE, "dp8"), 8).bytes
    table, layer = 512 * 128, 3 * 128 * 256 + 2 * 128 * 128 + 2 * 128 * 64
    # The embedding is gathered too, though it is not read whole.
    gathered = 2 * (2 * table + 2 * layer)
    assert moved - still == gathered * (1 + 1 / 4)


@pytest.mark.meshes
def test_split_experts_are_gathered_once_per_burst():
    model = work(EXPERTS, "dp2,fsdp4")
    (two, four) = (model.decode(64, 0, steps).bytes for steps in (2, 4))
    still = work(EXPERTS, "dp8")
    step = still.decode(64, 0, 4).bytes - still.decode(64, 0, 2).bytes
    # Attention, the shared MLP, the router and the head are split as well.
    attention = 2 * 128 * 128 + 2 * 128 * 64
    others = 2 * (attention + 3 * 128 * 64 + 16 * 128) + 512 * 128
    assert four - two == step + 2 * others * 2 * (1 + 1 / 4)


@pytest.mark.meshes
def test_experts_of_a_device_compute_the_tokens_of_their_group():
    whole, split = work(EXPERTS), work(EXPERTS, "dp2,ep4")
    assert decoded(split, 64).flops == decoded(whole, 64).flops / 8
    (gate, *_) = (p for p in split.products() if p.name.endswith("experts.gate"))
    assert (gate.experts, gate.chosen, gate.parts) == (4, 2, 1)
    # A token chooses 2 of 16 experts; one of two tokens misses both 49 in 64 times.
    assert gate.used(1) == 2 / 16
    assert gate.used(2) == 1 - (14 / 16) ** 2


def test_prefill_that_does_not_divide_is_computed_everywhere():
    model = work(DENSE, "dp1")
    one = model.prefill(1, 64)
    assert model.prefill(4, 64).flops == 4 * one.flops
    # Written: 64 tokens of keys and values.
    assert one.bytes > 64 * model.cache_bytes


@pytest.mark.meshes
def test_rows_of_a_prefill_are_split_only_if_they_divide():
    model = work(DENSE, "dp8")
    one, eight = model.prefill(1, 64), model.prefill(8, 64)
    attention = 64 * 64 * 4 * 8 * 16
    # One row's tokens are split over the devices, its attention is not.
    assert one.flops == (eight.flops - attention) / 8 + attention


def test_training_costs_six_flops_per_parameter_and_token():
    config = PRESETS["llama-3.1-8b"]
    model, tokens = work(config), 4 * 4096
    down = 32 * 4096 * 14336
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024) + 3 * down
    attention = 32 * tokens * 4096 * 4 * 4096
    none = model.accumulate(4, 4096, 0, "none", scan=False).flops
    full = model.accumulate(4, 4096, 0, "full", scan=False).flops
    # No scored token still computes a tile of logits.
    tile = 3 * 2 * tile_rows(128256) * 128256 * 4096
    # Attention recomputes its scores: 2 forward, 2 backward; one more with remat. The
    # backward pass needs no output of a layer's last product.
    assert none == 6 * layers * tokens + 4 * attention + tile
    assert full == (8 * layers - 2 * down) * tokens + 5 * attention + tile


def test_the_optimizer_step_moves_34_bytes_per_parameter():
    # Gradient twice, moments and masters in and out, the bfloat16 parameter.
    bytes_moved = 1000 * (8 + 16 + 8)
    assert work(DENSE).apply(1000, 8000) == Work(0.0, bytes_moved + 1000 * 2)
    assert work(DENSE, dtype="float32").apply(1000, 8000) == Work(0.0, bytes_moved)


CONFIGS = {"dense": DENSE, "latent": LATENT, "experts": EXPERTS}


def xla_flops(function, *arguments, **static) -> float:
    """XLA's count of a program without loops, before it is optimized."""
    return function.lower(*arguments, **static).cost_analysis()["flops"]


def functions(config: ModelConfig) -> tuple[DeviceFunctions, tuple]:
    sizes = EngineConfig(
        num_slots=256,
        max_prompt_tokens=64,
        max_tokens=64,
        steps_per_call=1,
        prefill_tokens=64 * 64,
    )
    made = DeviceFunctions(config, sizes, BF16, None, DEFAULT_RULES)
    params = models.abstract(models.param_specs(config), BF16)
    return made, (params, made.pages_shape)


def shapes_of(rows):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), rows)


def waiting(made: DeviceFunctions, prompts: int, length: int) -> Scheduler:
    """A scheduler with prompts of 4 samples each."""
    scheduler = Scheduler(made.sizes)
    for prompt in range(prompts):
        scheduler.submit(Request(prompt, (prompt,) * length, 4))
    return scheduler


@pytest.mark.parametrize("name", ["dense", "latent"])
def test_xla_counts_a_decoding_step_alike(name):
    made, (params, pages) = functions(CONFIGS[name])
    scheduler = waiting(made, 64, 64)
    scheduler.prefill()
    burst = scheduler.burst()
    assert burst is not None
    rows = shapes_of(batches.rows(burst, made.sizes, 1))
    key = jax.eval_shape(lambda: jax.random.key(0))
    floor = jax.ShapeDtypeStruct((), jnp.int32)
    found = xla_flops(
        made.decode, params, pages, rows, key, floor, burst=made.burst(truncate=False)
    )
    expected = (
        work(CONFIGS[name]).decode(256, 64, 1, groups=64, members=4, shared=64).flops
    )
    # XLA also counts elementwise operations.
    assert expected < found < 1.1 * expected


@pytest.mark.parametrize("name", ["dense", "latent"])
def test_xla_counts_a_prefill_alike(name):
    made, (params, pages) = functions(CONFIGS[name])
    ((rows, _),) = batches.prefill_calls(waiting(made, 64, 64).prefill(), made.sizes, 1)
    assert rows.tokens.shape == (64, 64)
    found = xla_flops(made.prefill, params, pages, shapes_of(rows))
    expected = work(CONFIGS[name]).prefill(64, 64).flops
    assert expected < found < 1.1 * expected


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("name", ["dense", "latent"])
def test_xla_counts_a_training_pass_alike(name, remat):
    config, shape = CONFIGS[name], (16, 64)
    policy = pure.Policy(config, remat=remat)
    params = models.abstract(models.param_specs(config), BF16)
    integers = jax.ShapeDtypeStruct(shape, jnp.int32)
    floats = jax.ShapeDtypeStruct(shape, jnp.float32)
    batch = TokenBatch(
        tokens=integers,
        positions=integers,
        ends=integers,
        loss_mask=jax.ShapeDtypeStruct(shape, jnp.bool_),
        advantages=floats,
        behavior_logprobs=floats,
        versions=integers,
    )
    objective = grpo().objective
    total = jax.eval_shape(
        lambda *inputs: pure.empty_accumulator(policy, objective, *inputs),
        params,
        batch,
    )

    def accumulate(params, total, batch):
        return pure.accumulate(policy, objective, params, total, batch)

    found = xla_flops(jax.jit(accumulate), params, total, batch)
    expected = work(config).accumulate(*shape, 1024, remat, scan=False).flops
    assert expected < found < 1.1 * expected


@pytest.mark.meshes
def test_stages_wait_and_pass_on_by_hand():
    """Two stages of a layer each, two microbatches: 3 ticks, one of them idle."""
    staged, plain = work(DENSE, "pp2,dp4"), work(DENSE, "dp8")
    schedule = staged.schedule(8)
    assert schedule == Schedule(stages=2, rounds=1, groups=1)
    found, whole = (
        model.accumulate(8, 16, 0.0, "none", scan=False) for model in (staged, plain)
    )
    layer, table = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256, 512 * 128
    # A forward and a backward pass of two layers; 16 tokens see 16 keys in 8 heads.
    layers = 3 * 2 * (2 * 16 * layer + 2 * 16 * 16 * 8 * 2 * 16)
    assert found.flops - whole.flops == pytest.approx(0.5 * layers)
    # Three exchanges a tick of the 16 tokens of a microbatch; half of a stage's layer,
    # which the other stage holds; forward and backward.
    passed = 2 * (3 * 3 * 16 * 128 + layer / 2)
    # Both tables are gathered, and gradients are summed over dp.
    tables = 2 * table / 2
    summed = 2 * (1 - 1 / 4) * (2 * layer + table) / 2
    assert found.received == 2 * (passed + tables + summed)


@pytest.mark.meshes
def test_more_rows_of_a_device_are_groups_of_microbatches():
    assert work(DENSE, "pp2,dp4").schedule(24).groups == 3
    assert work(DENSE, "dp8").schedule(24) is None
