"""`launch.plan`: programs of a TPU slice from shapes alone."""

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post import models
from jaxrl_post.algorithms import grpo
from jaxrl_post.config import plan as plan_config
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.run import UpdateConfig
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.learner import learner as learning
from jaxrl_post.learner import state as training
from jaxrl_post.learner.adapters import with_adapter
from jaxrl_post.learner.model import Model
from jaxrl_post.models import ModelConfig
from jaxrl_post.pretrained.families import write_config
from jaxrl_post.programs.planning import compiling
from jaxrl_post.programs.planning.plan import HBM_GIB, programs
from jaxrl_post.programs.planning.program import Program
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh, per_device_bytes
from jaxrl_post.types import TokenBatch
from launch import plan

CONFIG = ModelConfig("llama", 128, 64, 128, 1, num_heads=4, num_kv_heads=2)
# Embedding and unembedding, attention, MLP, norms.
PARAMETERS = 2 * 128 * 64 + (2 * 64 * 64 + 2 * 64 * 32) + 3 * 64 * 128 + 3 * 64

tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu, the compiler for TPUs (extra tpu)",
)


def planned(**options) -> plan_config.PlanConfig:
    return plan_config.PlanConfig("tiny", "v5e:2x4", row_tokens=16, **options)


@pytest.fixture
def mesh():
    return create_mesh("dp2,fsdp2,tp2")


def kinds(tree):
    return jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding.spec if x.ndim else None), tree
    )


@pytest.mark.meshes
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_programs_are_those_of_a_learner(mesh, dtype):
    """A learner with arrays has the states and accumulators that were planned."""
    empty, accumulate, apply = programs(planned(dtype=dtype), CONFIG, mesh)
    assert [p.name for p in (empty, accumulate, apply)] == [
        "empty",
        "accumulate",
        "apply",
    ]
    specs = models.param_specs(CONFIG)
    params = models.initialize(jax.random.key(0), specs, jnp.dtype(dtype), mesh)
    optimizer = training.make_optimizer(OptimizerConfig(), specs, 10)
    layout = training.shardings(
        specs, optimizer, mesh, DEFAULT_RULES, narrow=dtype != "float32"
    )
    state = training.create(params, optimizer, layout)
    learner = learning.Learner(
        policy=accumulate.arguments[0],
        objective=grpo().objective,
        optimizer=optimizer,
        max_grad_norm=1.0,
        layout=layout,
        mesh=mesh,
        microbatch_rows=4,
    )
    integers, floats = np.ones((4, 16), np.int32), np.zeros((4, 16), np.float32)
    batch = TokenBatch(
        integers, integers, integers, integers > 0, floats, floats, integers
    )
    (piece,) = learner.scorer.microbatches(batch)
    with jax.set_mesh(mesh):
        total = learner.empty(learner.policy, state.params, piece)
    assert kinds(apply.arguments) == kinds((state, total))
    assert kinds(accumulate.arguments[1:]) == kinds((state.params, total, piece))
    assert kinds(accumulate.beside[0]) == kinds(state.replace(params=None))
    assert kinds(empty.beside[0]) == kinds(state)


@pytest.mark.meshes
@pytest.mark.parametrize("kind", [None, "int8", "nf4"])
def test_an_adapters_programs_are_those_of_its_learner(mesh, kind):
    lora = AdapterConfig(rank=4, quantize=kind)
    empty, accumulate, apply = programs(planned(lora=lora), CONFIG, mesh)
    specs = models.param_specs(CONFIG)
    params = models.initialize(jax.random.key(0), specs, jnp.bfloat16, mesh)
    model = Model(
        "tiny", CONFIG, specs, params, Tokenizer.train(["1"]), mesh, DEFAULT_RULES, True
    )
    model = with_adapter(lora, model, seed=0)
    update = UpdateConfig(microbatch_tokens=64, remat="full")
    learner, state = learning.begin_training(
        model, grpo().objective, OptimizerConfig(), update, num_steps=10
    )
    assert kinds(apply.arguments[0]) == kinds(state)
    assert kinds(accumulate.arguments[:2]) == kinds((learner.predictor, state.params))
    # While it is applied, the base stays where it is.
    assert kinds(apply.beside[0]) == kinds(empty.beside[1]) == kinds(model.base)
    # All but what is trained is an argument once.
    assert kinds(accumulate.beside[0]) == kinds(state.replace(params=None))


@pytest.mark.meshes
@pytest.mark.parametrize("name", ["muon", "adafactor", "lion", "sgd"])
def test_the_state_is_that_of_the_planned_optimizer(mesh, name):
    moment = "float32" if name == "adafactor" else "bfloat16"
    options = plan_config.PlannedOptimizer(name, moment)
    *_, apply = programs(planned(optimizer=options), CONFIG, mesh)
    specs = models.param_specs(CONFIG)
    optimizer = training.make_optimizer(
        OptimizerConfig(name=name, moment_dtype=moment), specs, 10
    )
    layout = training.shardings(specs, optimizer, mesh, DEFAULT_RULES, narrow=True)
    params = models.initialize(jax.random.key(0), specs, jnp.bfloat16, mesh)
    state = training.create(params, optimizer, layout)
    assert kinds(apply.arguments[0]) == kinds(state)
    # The bytes of the state are read and written; Muon's products are not counted.
    assert (apply.work is None) == (name == "muon")
    if apply.work is not None:
        owned = sum(
            each.addressable_shards[0].data.size for each in jax.tree.leaves(params)
        )
        moved = owned * (8 + 8 + 2) + 2 * per_device_bytes(state.opt_state)
        assert apply.work.bytes == moved


def test_an_option_without_effect_on_the_planned_optimizer(mesh):
    options = plan_config.PlannedOptimizer("adafactor", "bfloat16")
    with pytest.raises(ConfigError, match=r"^--optimizer.moment-dtype: has no"):
        list(programs(planned(optimizer=options), CONFIG, mesh))


def test_rows_must_fill_the_batch_axes(mesh):
    with pytest.raises(
        plan_config.PlanError, match=r"--rows: .* multiple of 4, .* got 6 of 16"
    ):
        list(programs(planned(rows=6), CONFIG, mesh))


def run(*arguments: str) -> int:
    return plan.main(list(arguments))


def test_a_model_that_nobody_published(capsys, tmp_path):
    assert run(f"--model={tmp_path}/llama-3.1-7b", "--topology=v5e:2x2") == 1
    printed = capsys.readouterr().out
    assert "is neither a directory with a config.json nor a preset" in printed
    assert "presets are llama-3.1-70b, llama-3.1-8b" in printed


def test_without_the_compiler_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert run("--model=qwen3-0.6b", "--topology=v5e:2x2") == 1
    printed = capsys.readouterr().out
    assert "error: libtpu is not installed" in printed
    # The version that the installed jax asks for.
    assert "pip install 'libtpu==0.0." in printed


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(write_config(CONFIG)))
    return tmp_path


@pytest.mark.usefixtures("compiled_anew")
@tpu_compiler
def test_a_tiny_step_for_a_slice_that_is_not_there(tiny, capsys):
    arguments = f"--model={tiny}", "--topology=v5e:2x2", "--mesh=fsdp2,tp2"
    shape = "--row-tokens=128", f"--json={tiny}/plan.json", f"--hlo={tiny}/hlo"
    assert run(*arguments, *shape) == 0
    assert "fits: 0." in capsys.readouterr().out
    made = json.loads((tiny / "plan.json").read_text())
    assert made["parameters"] == PARAMETERS
    assert (made["devices"], made["device_kind"]) == (4, "TPU v5 lite")
    assert made["hbm_bytes"] == 15.75 * 2**30
    empty, accumulate, apply = made["programs"]
    quarter = (PARAMETERS - 3 * 64) // 4 + 3 * 64  # Norms are whole everywhere.
    # Parameters in bfloat16 and their gradients in float32; so small, their tiles in
    # memory are mostly padding.
    assert 6 * quarter < accumulate["arguments"] < 4 * 6 * quarter
    # The accumulator is donated.
    assert 4 * quarter <= accumulate["aliased"] <= accumulate["outputs"]
    # Masters, two moments and three counters wait.
    assert accumulate["beside"] == 12 * quarter + 3 * 4
    assert apply["beside"] == 0
    assert 18 * quarter < apply["arguments"] < 4 * 18 * quarter
    assert 14 * quarter < apply["aliased"] <= apply["outputs"]
    assert empty["arguments"] == 0
    gathered = {entry["kind"] for entry in accumulate["collectives"]}
    assert "all-gather" in gathered
    assert "all-gather" in (tiny / "hlo" / "accumulate.txt").read_text()


@pytest.mark.usefixtures("compiled_anew")
@tpu_compiler
def test_a_step_that_does_not_fit_ends_with_status_1(tmp_path, capsys):
    # 2 x 6,291,456 x 64 parameters on every device, with 18 bytes each: 13.5 GiB, and
    # what a program computes.
    wide = dataclasses.replace(CONFIG, vocab_size=3 * 2**21)
    (tmp_path / "config.json").write_text(json.dumps(write_config(wide)))
    arguments = f"--model={tmp_path}", "--topology=v5e:2x2", "--row-tokens=128"
    assert run(*arguments, "--mesh=dp4") == 1
    assert re.search(r"error: does not fit: 1\d\.\d\d of 15", capsys.readouterr().out)


@pytest.mark.usefixtures("compiled_anew")
@tpu_compiler
@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_memory_is_what_the_compiler_says(name):
    plan.load()  # Variables that libtpu reads from the process's environment.
    device = compiling.slice_devices(name)[0]
    mesh = create_mesh("dp1", [device])
    large = jax.ShapeDtypeStruct(
        (2**28, 256), jnp.float32, sharding=NamedSharding(mesh, P())
    )
    program = Program("large", jax.jit(lambda x: x.T + 1.0), (large,), (), mesh)
    with pytest.raises(compiling.DoesNotFitError, match="large: does not fit") as error:
        compiling.compile_program(program, {}, None)
    limit = HBM_GIB[device.device_kind]
    assert f"available HBM ({limit:.2f}G)" in str(error.value)


@pytest.mark.usefixtures("compiled_anew")
@tpu_compiler
@pytest.mark.parametrize("name", ["v9x:2x2", "v5e:3x5", "sixteen"])
def test_a_slice_that_does_not_exist(name, capsys):
    assert run("--model=qwen3-0.6b", f"--topology={name}") == 1
    printed = capsys.readouterr().out
    assert f"error: --topology: the compiler knows no '{name}'; write" in printed


@pytest.mark.usefixtures("compiled_anew")
@tpu_compiler
def test_options_of_the_compiler_have_a_value(capsys):
    arguments = "--model=qwen3-0.6b", "--topology=v5e:2x2"
    assert run(*arguments, "--compiler-options", "xla_fast") == 1
    printed = capsys.readouterr().out
    assert "--compiler-options: must be NAME=VALUE; got 'xla_fast'" in printed
