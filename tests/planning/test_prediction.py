"""Seconds of a step: rooflines by hand, and the links of compiled programs."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxrl_post import models
from jaxrl_post.config.plan import PlanConfig, PlannedRates, PlannedRollout
from jaxrl_post.models import ModelConfig
from jaxrl_post.pretrained.families import write_config
from jaxrl_post.programs.build.layouts import gathered_bytes
from jaxrl_post.programs.planning import tables
from jaxrl_post.programs.planning.chips import CHIPS, Chip
from jaxrl_post.programs.planning.compiling import ProgramPlan, slice_devices
from jaxrl_post.programs.planning.prediction import (
    assumptions,
    budget,
    phases,
    times,
)
from jaxrl_post.sharding import create_mesh
from launch import plan

# One operation, one byte of memory and half a byte of a link per second.
SLOW = Chip(1.0, 1.0, 0.5, "a page")


def entry(name: str, calls: int, flops, memory, links: float) -> ProgramPlan:
    return ProgramPlan(name, 0, 0, 0, 0, 0, 0, 0.0, (), calls, flops, memory, links)


def test_a_program_takes_as_long_as_its_slowest_part():
    found = times(entry("decode 64", 3, 2.0, 4.0, 1.0), SLOW)
    assert found == (3 * 2.0, 3 * 4.0, 3 * 2.0)
    assert found is not None
    assert (found.seconds, found.bound) == (12.0, "memory")
    assert times(entry("apply", 1, None, None, 1.0), SLOW) is None


def test_the_overhead_of_a_call_is_added_to_its_roofline():
    slow = dataclasses.replace(entry("decode 64", 3, 2.0, 4.0, 1.0), overhead=0.5)
    assert phases([slow], SLOW) == {"decode": 12.0 + 3 * 0.5, "step": 13.5}


def test_rates_below_the_peak_take_longer():
    half = SLOW.reaching(PlannedRates(compute=0.5, memory=0.25, links=1.0))
    assert (half.flops, half.memory_bandwidth, half.link_bandwidth) == (0.5, 0.25, 0.5)
    config = PlanConfig("m", "v5e:2x2", rates=PlannedRates(0.5, 0.25))
    said = assumptions(config, half)[0]
    assert said.startswith("Rates, by --rates 0.5 of the peak FLOP/s, 0.25 of the mem")


def test_what_a_week_holds_by_hand():
    rollout = PlannedRollout(
        prompts_per_step=10, samples_per_prompt=4, max_prompt_tokens=7, max_tokens=90
    )
    config = PlanConfig("m", "v5e:2x2", rollout=rollout, mean_tokens=50, days=7)
    # 604,800 seconds, of 1,000 each; 40 samples of 7 + 50 tokens.
    assert budget(config, 1000.0) == (7, 604, 24160, 604 * 40 * 57, 604 * 40 * 50)
    assert budget(dataclasses.replace(config, days=0), 1000.0) is None
    assert budget(dataclasses.replace(config, rollout=PlannedRollout()), 9.0) is None


def test_the_step_is_the_sum_of_its_phases():
    made = [
        entry("publish 1", 2, 0.0, 1.0, 1.0),
        entry("publish 2", 1, 0.0, 5.0, 1.0),
        entry("decode 32", 2, 3.0, 1.0, 0.0),
        entry("decode 64", 1, 3.0, 7.0, 0.0),
    ]
    assert phases(made, SLOW) == {
        "publish": 2 * 2.0 + 5.0,
        "decode": 2 * 3.0 + 7.0,
        "step": 9.0 + 13.0,
    }
    assert phases([entry("apply", 1, None, None, 1.0)], SLOW) == {}


def test_rates_are_those_of_the_vendors_pages():
    """FLOP/s, bytes per second of HBM, and half of the links' bidirectional ones."""
    assert {
        kind: (chip.flops, chip.memory_bandwidth, chip.link_bandwidth)
        for kind, chip in CHIPS.items()
    } == {
        "TPU v5 lite": (197e12, 819e9, 200e9),
        "TPU v5": (459e12, 2765e9, 600e9),
        "TPU v6 lite": (918e12, 1638e9, 400e9),
        "NVIDIA H100 80GB HBM3": (989.5e12, 3350e9, 450e9),
        "NVIDIA H200": (989.5e12, 4800e9, 450e9),
        # An eighth of 36 PFLOP/s with sparsity, and of 64 TB/s.
        "NVIDIA B200": (2250e12, 8000e9, 900e9),
    }


def test_assumptions_name_the_inputs_and_the_source():
    rollout = PlannedRollout(prompts_per_step=4, max_prompt_tokens=7, max_tokens=9)
    said = " ".join(assumptions(PlanConfig("m", "v5e:2x2", rollout=rollout), SLOW))
    assert "4 prompts x 8, each of 7 prompt tokens and 9 decoded tokens" in said
    assert "(a page)" in said
    alone = " ".join(assumptions(PlanConfig("m", "v5e:2x2"), SLOW))
    assert "A step is one microbatch" in alone


def test_a_step_in_turns_is_printed_as_it_was(capsys):
    console = Console(width=80, file=sys.stdout)
    chip = Chip(1e12, 1e9, 0.5e9, "a page")
    made = [entry("decode 64", 3, 2e12, 4e9, 1e9)]
    tables.print_prediction(made, chip, phases(made, chip), ("One.", "Two."), console)
    printed = capsys.readouterr().out
    table, _, rest = printed.partition("predicted")
    assert [" ".join(line.split()) for line in table.splitlines()] == [
        "a step, on a device",
        "program calls TFLOP HBM GB link GB seconds bound by",
        "decode 64 3 6.00 12.00 3.00 12.000 memory",
    ]
    assert rest == ": decode 12.000 s, step 12.000 s\n- One.\n- Two.\n"


def test_what_a_prediction_in_turns_takes_for_granted_is_as_it_was():
    rollout = PlannedRollout(prompts_per_step=4, max_prompt_tokens=7, max_tokens=9)
    config = PlanConfig("m", "v5e:2x2", rollout=rollout)
    assert assumptions(config, SLOW)[1:] == (
        "A step samples 4 prompts x 8, each of 7 prompt tokens and 9 decoded tokens.",
        "Computation, memory and links of a program overlap completely; programs do "
        "not overlap. No time for judging, packing or the host.",
        "FLOPs and bytes of memory are counted from the shapes of matrix products, "
        "attention, cache and optimizer; other operations are free.",
        "Bytes over links are counted from the compiled collectives (publish: from "
        "its plan), loops times their trips; a collective uses all links of a chip.",
        "Experts are chosen at random and equally often.",
    )


tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu, the compiler for TPUs (extra tpu)",
)
# Large enough that the compiler gathers weights instead of activations.
CONFIG = ModelConfig("llama", 2048, 512, 2048, 2, num_heads=8, num_kv_heads=8)


def planned(folder: Path, *arguments: str) -> dict:
    (folder / "config.json").write_text(json.dumps(write_config(CONFIG)))
    file = folder / "plan.json"
    common = f"--model={folder}", "--topology=v5e:2x2", f"--json={file}"
    assert plan.main([*common, *arguments]) == 0
    return json.loads(file.read_text())


def programs(made: dict, name: str) -> list[dict]:
    return [p for p in made["programs"] if p["name"].startswith(name)]


SAMPLED = (
    "--rollout.prompts-per-step=8",
    "--rollout.max-prompt-tokens=128",
    "--rollout.max-tokens=128",
    "--row-tokens=256",
)


@pytest.mark.usefixtures("compiled_anew")
@tpu_compiler
def test_decoding_under_fsdp_receives_the_weights_at_every_step(tmp_path):
    made = planned(tmp_path, "--mesh=fsdp4", *SAMPLED)
    decode = programs(made, "decode")
    steps, mesh = 32, create_mesh("fsdp4", slice_devices("v5e:2x2"))
    specs = models.param_specs(CONFIG)
    params = models.abstract(specs, jnp.bfloat16, mesh)
    # The compiler takes the gathers of the embedding and of the head out of the loop.
    once = gathered_bytes((params.embedding, params.unembedding))
    every = gathered_bytes(params) - once
    # A program for every size of the samples' own keys.
    assert len(decode) == 2
    assert sum(each["calls"] for each in decode) == 128 // steps
    seconds, total = made["prediction"]["seconds"], 0.0
    for each in decode:
        assert each["link_bytes"] == pytest.approx(steps * every + once, rel=0.01)
        links = each["calls"] * each["link_bytes"] / 200e9
        assert made["prediction"]["programs"][each["name"]]["links"] == links
        total += links
    assert seconds["decode"] >= total
    assert "publish" not in seconds
    assert seconds["step"] == pytest.approx(
        sum(value for name, value in seconds.items() if name != "step")
    )


@pytest.mark.all
@pytest.mark.usefixtures("compiled_anew")
@tpu_compiler
def test_another_layout_is_paid_for_once_and_saves_every_step(tmp_path, capsys):
    made = planned(tmp_path, "--mesh=fsdp4", "--rollout.mesh=dp2,tp2", *SAMPLED)
    (publish,) = programs(made, "publish")
    # The plan's arithmetic, and the collectives that the compiler made of it.
    compiled = sum(c["received"] * c["count"] for c in publish["collectives"])
    assert compiled == pytest.approx(publish["link_bytes"], rel=0.01)
    seconds = made["prediction"]["seconds"]
    assert seconds["publish"] > 0
    # All-reduces over tp2 in place of gathers.
    for each in programs(made, "decode"):
        gathers = [c for c in each["collectives"] if c["kind"] == "all-gather"]
        assert all(c["bytes"] < 2048 * 512 for c in gathers)
    printed = capsys.readouterr().out
    assert "predicted: publish 0.0" in printed
    assert "link GB" in printed


@pytest.mark.usefixtures("compiled_anew")
@tpu_compiler
@pytest.mark.parametrize(
    "scan", ["--scan-layers", pytest.param("--no-scan-layers", marks=pytest.mark.all)]
)
def test_a_loop_over_layers_counts_as_its_layers(tmp_path, scan):
    made = planned(tmp_path, "--mesh=fsdp4", "--row-tokens=512", scan)
    (found,) = programs(made, "accumulate")
    received = found["link_bytes"]
    mesh = create_mesh("fsdp4", slice_devices("v5e:2x2"))
    params = models.abstract(models.param_specs(CONFIG), jnp.bfloat16, mesh)
    layers = gathered_bytes(params.layers)
    tables = gathered_bytes((params.embedding, params.unembedding))
    # Weights forward and backward, gradients once; the tables' gradients in float32.
    # The last layer's backward pass follows its forward pass: without a loop, the
    # compiler may keep some of its gathered weights.
    last = gathered_bytes(params.layers[-1]) if scan == "--no-scan-layers" else 0
    assert received >= 3 * layers - last + 3 * tables
    assert received < 4.5 * layers + 4 * tables


@pytest.mark.all
@pytest.mark.usefixtures("compiled_anew")
@tpu_compiler
def test_both_pools_are_compiled(tmp_path, capsys):
    apart = "--samplers=1", "--rollout.mesh=tp2", "--rollout.ahead=1"
    made = planned(tmp_path, "--mesh=fsdp-1", *apart, *SAMPLED)
    names = [each["name"].split()[0] for each in made["programs"]]
    assert names == ["prefill", "decode", "decode", "empty", "accumulate", "apply"]
    # One more version of the parameters stays while a sampler works.
    for each in programs(made, "decode"):
        assert each["beside"] == made["divisions"][1]["memory"][1]["copies"] / 2
    pace = made["divisions"][1]["pace"]
    assert made["prediction"]["seconds"]["publish"] == pace["publish"]
    assert "best: 1 samplers of 2, 2 devices train" in capsys.readouterr().out
