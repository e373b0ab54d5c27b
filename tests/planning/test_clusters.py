"""Clusters of GPUs: nodes, links inside and between them, and their memory."""

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import jax
import pytest

from jaxrl_post.config.plan import PlanConfig, PlanError, PlannedRollout
from jaxrl_post.models import ModelConfig
from jaxrl_post.pretrained.families import write_config
from jaxrl_post.programs.planning.chips import (
    CHIPS,
    Chip,
    chip_of,
    named_devices,
    nodes_of,
)
from jaxrl_post.programs.planning.gpus import GPUS, target_config
from jaxrl_post.programs.planning.hlo import Collective, collectives
from jaxrl_post.programs.planning.links import Network, slowdown, warning_of_tp
from jaxrl_post.programs.planning.pools import divide
from jaxrl_post.sharding import create_mesh
from launch import plan

# Two nodes of four devices; a byte takes nine times as long between them.
TWO = Network((0, 0, 0, 0, 1, 1, 1, 1), 9.0)
CONFIG = ModelConfig(
    "llama", 1024, 256, 512, 2, num_heads=8, num_kv_heads=4, head_dim=64
)


@pytest.mark.parametrize(
    ("topology", "nodes"),
    [
        ("h100:8x8", (8, 8)),
        ("h200:2x4", (2, 4)),
        # Nodes of eight, or fewer GPUs in one.
        ("h100:64", (8, 8)),
        ("b200:4", (1, 4)),
        ("v5p:4x4x4", None),
    ],
)
def test_nodes_of_a_topology(topology, nodes):
    assert nodes_of(topology) == nodes
    if nodes is not None:
        found = named_devices(topology)
        assert [device.id for device in found] == list(range(nodes[0] * nodes[1]))
        assert found[-1].process_index == nodes[0] - 1
        chip = chip_of(topology)
        assert chip is not None
        assert chip.of_host == nodes[1]


@pytest.mark.parametrize("shape", ["", ":", ":0", ":8x", ":0x8", ":8x8x8", ":eight"])
def test_a_topology_that_cannot_be_read(shape):
    said = rf"^--topology: write nodes x GPUs of a node, .* got 'h200{shape}'$"
    with pytest.raises(PlanError, match=said):
        named_devices(f"h200{shape}")


def test_gpus_that_fill_no_nodes():
    said = r"--topology: 12 GPUs are no whole nodes; write .* in nodes of 8; got"
    with pytest.raises(PlanError, match=said):
        chip_of("h100:12")


def test_every_gpu_has_rates_and_facts():
    kinds = {kind for kind in CHIPS if kind.startswith("NVIDIA")}
    assert kinds == GPUS.keys()
    for kind in kinds:
        assert f'"{kind}"' in target_config(kind)
        # The compiler is told the bandwidth of the vendor's page, within a twentieth.
        bandwidth = CHIPS[kind].memory_bandwidth
        assert GPUS[kind].bandwidth == pytest.approx(bandwidth, rel=0.05)


@pytest.mark.parametrize(
    ("groups", "ring", "exchange"),
    [
        # Inside of a node: links alone.
        ([[0, 1, 2, 3], [4, 5, 6, 7]], 1.0, 1.0),
        # One device on each node: all it receives comes over its own network.
        ([[0, 4], [1, 5]], 9.0, 9.0),
        # A ring enters a node by four networks; in an exchange four of the other seven
        # are on the other node.
        ([[0, 1, 2, 3, 4, 5, 6, 7]], 9 / 4, 9 * 4 / 7),
        # Three and one: the ring has one network, and the one device has no neighbour.
        ([[0, 1, 2, 4]], 9.0, 9.0),
        # The slowest group counts.
        ([[0, 1], [3, 4]], 9.0, 9.0),
    ],
)
def test_links_of_groups_by_hand(groups, ring, exchange):
    assert TWO.ring(groups) == ring
    assert TWO.exchange(groups) == pytest.approx(exchange)
    everywhere = dataclasses.replace(TWO, slower=1.0)
    assert everywhere.ring(groups) == everywhere.exchange(groups) == 1.0


def test_a_fast_network_is_not_faster_than_links():
    assert Network((0, 0, 1, 1), 1.5).ring([[0, 1, 2, 3]]) == 1.0


@pytest.mark.meshes
@pytest.mark.parametrize(
    ("mesh", "of_host", "slower"),
    [
        ("dp2,tp4", 4, 1.0),
        ("tp8", 4, 9 / 4),
        # tp4 on nodes of three devices: the first group has three and one.
        ("dp2,tp4", 3, 9.0),
    ],
)
def test_a_tp_that_spans_nodes_is_warned_of(mesh, of_host, slower):
    chip = Chip(1.0, 1.0, 1.0, "a page", of_host, 9.0)
    made = create_mesh(mesh)
    assert slowdown(made, ("tp",), chip) == slower
    said = warning_of_tp(made, chip, "--mesh")
    if slower == 1.0:
        assert said is None
        return
    assert said is not None
    assert said.startswith(f"--mesh: tp{made.shape['tp']} spans nodes of {of_host} GPU")
    assert f"{slower:.3g} times as long" in said
    assert warning_of_tp(made, None, "--mesh") is None


# A program as XLA writes it for GPUs: loops that tell their trips or compare in a
# fusion, operands in a tuple of their own, and groups written in four ways.
COMPILED = """HloModule jit_run

%fused_and (p: s32[], q: s32[]) -> pred[] {
  %c = s32[] constant(32)
  ROOT %lt = pred[] compare(%p, %c), direction=LT
}
%fused_reduce (p: pred[32]) -> s32[] {
  %zero = s32[] constant(0)
  ROOT %r = s32[] reduce(%p, %zero), dimensions={0}
}
%burst_condition (p: (s32[], f32[16])) -> pred[] {
  %some = s32[] fusion(%a), kind=kCustom, calls=%fused_reduce
  ROOT %and = pred[] fusion(%b, %some), kind=kLoop, calls=%fused_and
}
%burst_body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %ar = f32[16]{0} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
}
%layers_condition (p: (s32[], f32[16])) -> pred[] {
  ROOT %lt = pred[] fusion(%i), kind=kLoop, calls=%elsewhere
}
%layers_body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %ags = ((bf16[2,4]{1,0}, bf16[2]{0}), (bf16[4,4]{1,0}, bf16[4]{0})) all-gather-start(%a, %b), channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %rss = ((f32[8]{0}), f32[4]{0}) reduce-scatter-start(%c), channel_id=3, replica_groups=mesh['dp'=2,'fsdp'=2,'tp'=2] {'dp','tp'}, dimensions={0}
}
ENTRY %main (p: f32[4]) -> f32[4] {
  %w = (s32[], f32[16]{0}) while(%t), condition=%burst_condition, body=%burst_body
  %l = (s32[], f32[16]{0}) while(%u), condition=%layers_condition, body=%layers_body, backend_config={"known_trip_count":{"n":"28"},"dynamic_variables":[]}
  %ars = ((f32[16]{0}, f32[8]{0}), (f32[16]{0}, f32[8]{0})) all-reduce-start(%d, %e), channel_id=4, replica_groups={{0,1,2,3,4,5,6,7}}
  %cp = (s8[64]{0}, s8[64]{0}) collective-permute-start(%f), channel_id=5, source_target_pairs={{0,1},{3,4}}
  %a2a = s8[40]{0} all-to-all(%g), channel_id=6, replica_groups={{0,1,4,5},{2,3,6,7}}
}
"""  # noqa: E501


def test_collectives_of_a_program_for_gpus():
    assert set(collectives(COMPILED, network=TWO)) == {
        # Two groups of four, inside of a node; 32 steps.
        Collective("all-reduce", "f32[16]", 32, 64, 96, 1.0),
        # The transposed list pairs device 0 with device 4.
        Collective("all-gather", "bf16[4,4]", 28, 40, 20, 9.0),
        # dp and tp: devices 0, 1, 4 and 5.
        Collective("reduce-scatter", "f32[4]", 28, 16, 48, 9 / 2),
        # Operands do not count.
        Collective("all-reduce", "f32[16]", 1, 96, 2 * 96 * 7 // 8, 9 / 4),
        Collective("collective-permute", "s8[64]", 1, 64, 64, 9.0),
        Collective("all-to-all", "s8[40]", 1, 40, 30, 9 * 2 / 3),
    }
    assert all(each.slower == 1.0 for each in collectives(COMPILED))


ROLLOUT = PlannedRollout(
    prompts_per_step=8,
    samples_per_prompt=4,
    max_prompt_tokens=24,
    max_tokens=40,
    mesh="dp4,tp2",
)


def test_a_step_on_two_nodes_waits_for_the_network():
    one, two = (
        divide(
            PlanConfig("tiny", topology, mesh="fsdp8", row_tokens=128, rollout=ROLLOUT),
            CONFIG,
            chip,
        )[0]
        for topology in ("h100:1x8", "h100:2x4")
        for chip in [chip_of(topology)]
        if chip is not None
    )
    assert one.memory == two.memory
    links = [
        {each.name.split()[0]: each.link_bytes for each in division.programs}
        for division in (one, two)
    ]
    # All eight devices exchange parts; fsdp8 has four devices on each node; and the
    # sampler's tp2 is inside of one.
    factors = {"publish": 9 * 4 / 7, "accumulate": 9 / 4, "decode": 1, "prefill": 1}
    for name, factor in factors.items():
        assert links[1][name] == pytest.approx(factor * links[0][name])


def saved(folder: Path, config: ModelConfig) -> str:
    (folder / "config.json").write_text(json.dumps(write_config(config)))
    return f"--model={folder}"


def run(*arguments: str) -> int:
    return plan.main(list(arguments))


def test_a_cluster_is_counted_without_its_compiler(tmp_path, capsys):
    model, file = saved(tmp_path, CONFIG), tmp_path / "plan.json"
    step = "--rollout.prompts-per-step=8", "--rollout.max-tokens=64"
    common = "--topology=h100:2x4", "--mesh=fsdp2,tp4", "--no-compile", "--days=7"
    assert run(model, *common, *step, f"--json={file}") == 0
    printed = capsys.readouterr().out
    assert "8 x NVIDIA H100 80GB HBM3 as fsdp2,tp4, 71.20 GiB (0.9 of 79.11) each" in (
        printed.replace("\n", " ")
    )
    assert "Nodes have 4 GPUs" in printed
    assert "warning" not in printed
    made = json.loads(file.read_text())
    assert made["hbm_bytes"] == int(0.9 * 79.11 * 2**30)
    seconds = made["prediction"]["seconds"]
    assert {"prefill", "decode", "accumulate", "apply"} <= seconds.keys()
    held = made["prediction"]["budget"]
    assert held["steps"] == int(604_800 / seconds["step"])
    assert "in 7 days: " in printed


def test_memory_is_judged_by_the_share_that_programs_may_have(tmp_path, capsys):
    # 2 x 6,291,456 x 64 parameters, with 18 bytes each: 13.5 GiB, and the tables'
    # gradients.
    wide = ModelConfig("llama", 3 * 2**21, 64, 128, 1, num_heads=4, num_kv_heads=2)
    model, common = saved(tmp_path, wide), ("--topology=h100:1", "--no-compile")
    assert run(model, *common, "--row-tokens=128") == 0
    assert "does not fit" not in capsys.readouterr().out
    less = "--row-tokens=128", "--memory-fraction=0.15"
    assert run(model, *common, *less) == 1
    said = r"error: does not fit: at least 1\d\.\d\d of 11\.87 GiB \(0\.15 of 79\.11\)"
    assert re.search(said, capsys.readouterr().out)


@pytest.mark.meshes
def test_a_tp_over_two_nodes_is_told(tmp_path, capsys):
    model, common = saved(tmp_path, CONFIG), ("--topology=h100:2x4", "--no-compile")
    assert run(model, *common, "--mesh=tp8", "--row-tokens=128") == 0
    assert "warning: --mesh: tp8 spans nodes of 4 GPUs." in capsys.readouterr().out


def test_without_the_compiler_it_says_how_to_install_it(capsys, monkeypatch):
    for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run("--model=qwen3-0.6b", "--topology=h100:8x8") == 1
    printed = capsys.readouterr().out
    assert "error: jax_cuda12_plugin is not installed" in printed
    version = jax.__version__
    assert f"--target build/kernels/gpu jax-cuda12-plugin=={version}" in printed
    assert printed.rstrip().endswith("Or give --no-compile")


gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the compilers for NVIDIA's GPUs: make check-kernels",
)


@pytest.mark.usefixtures("compiled_anew")
@gpu_compiler
def test_a_tiny_step_for_a_cluster_that_is_not_there(tmp_path, capsys):
    model, file = saved(tmp_path, CONFIG), tmp_path / "plan.json"
    common = "--topology=h100:2x2", "--mesh=fsdp2,tp2", "--row-tokens=128"
    assert run(model, *common, f"--json={file}", f"--hlo={tmp_path}/hlo") == 0
    printed = capsys.readouterr().out
    assert "fits: 0." in printed
    # A column of the collectives.
    assert "slower" in printed
    made = json.loads(file.read_text())
    assert (made["devices"], made["device_kind"]) == (4, "NVIDIA H100 80GB HBM3")
    assert "jax-cuda12-plugin" in made["versions"]
    empty, accumulate, apply = made["programs"]
    norms = 5 * 256
    quarter = (made["parameters"] - norms) // 4 + norms  # Norms are whole everywhere.
    # Parameters in bfloat16, their gradients in float32, and a batch of 128 tokens.
    held = accumulate["arguments"]
    assert 6 * quarter < held < 6 * quarter + 128 * 64
    assert accumulate["aliased"] >= 4 * quarter
    # Masters, two moments and three counters wait.
    assert accumulate["beside"] == 12 * quarter + 3 * 4
    # Masters, moments and gradients are read, and of the parameters nothing.
    assert 16 * quarter < apply["arguments"] < 16 * quarter + 64
    assert empty["arguments"] == 0
    # Weights and gradients cross the nodes, which tp's sums do not.
    slower = {each["kind"]: each["slower"] for each in accumulate["collectives"]}
    assert slower["all-gather"] == slower["reduce-scatter"] == 9.0
    within = [
        each["slower"]
        for each in accumulate["collectives"]
        if (each["kind"], each["shape"]) == ("all-reduce", "bf16[128,256]")
    ]
    assert within
    assert set(within) == {1.0}
    received = sum(
        each["received"] * each["slower"] * each["count"]
        for each in accumulate["collectives"]
    )
    assert received == pytest.approx(accumulate["link_bytes"], rel=0.05)
    assert "all-gather" in (tmp_path / "hlo" / "accumulate.txt").read_text()


@pytest.mark.usefixtures("compiled_anew")
@gpu_compiler
def test_a_compiled_step_that_does_not_fit(tmp_path, capsys):
    """The compiler accepts any size: its memory is added up here."""
    model = saved(tmp_path, CONFIG)
    common = "--topology=h100:1x2", "--mesh=tp2", "--row-tokens=128"
    assert run(model, *common, "--memory-fraction=0.0001") == 1
    assert re.search(
        r"error: does not fit: 0\.\d\d of 0\.01 GiB", capsys.readouterr().out
    )


@pytest.mark.all
@pytest.mark.usefixtures("compiled_anew")
@gpu_compiler
@pytest.mark.parametrize("name", ["h200", "b200"])
def test_the_compiler_takes_the_other_gpus(name, tmp_path, capsys):
    model = saved(tmp_path, CONFIG)
    common = f"--topology={name}:1x2", "--mesh=tp2", "--row-tokens=128"
    assert run(model, *common) == 0
    assert f"2 x NVIDIA {name.upper()}" in capsys.readouterr().out


SAMPLED = (
    "--rollout.prompts-per-step=8",
    "--rollout.max-prompt-tokens=32",
    "--rollout.max-tokens=128",
    "--row-tokens=256",
    "--compile-largest",
)


@pytest.mark.usefixtures("compiled_anew")
@gpu_compiler
def test_a_step_with_its_sampler_compiles_the_largest_burst(tmp_path):
    model, file = saved(tmp_path, CONFIG), tmp_path / "plan.json"
    common = "--topology=h100:2x2", "--mesh=fsdp4", "--rollout.mesh=dp2,tp2"
    assert run(model, *common, *SAMPLED, f"--json={file}") == 0
    made = json.loads(file.read_text())
    bursts = [p for p in made["programs"] if p["name"].startswith("decode")]
    compiled = [burst for burst in bursts if burst["name"] in made["total_bytes"]]
    (largest,) = compiled
    assert len(bursts) > 1
    assert largest["name"] == "decode 64 x 32 + 128"
    # The loop over the burst's tokens has as many sums as layers have, and more.
    sums = [c for c in largest["collectives"] if c["kind"] == "all-reduce"]
    assert max(each["count"] for each in sums) >= 4 * 32
    assert {each["slower"] for each in sums if each["count"] >= 32} == {1.0}
    seconds = made["prediction"]["seconds"]
    assert {"publish", "prefill", "decode", "accumulate", "apply"} <= seconds.keys()


@pytest.mark.all
@pytest.mark.usefixtures("compiled_anew")
@gpu_compiler
def test_both_pools_of_a_cluster_are_compiled(tmp_path, capsys):
    model, file = saved(tmp_path, CONFIG), tmp_path / "plan.json"
    pools = "--topology=h100:2x2", "--mesh=fsdp-1", "--rollout.mesh=tp2"
    apart = "--samplers=any:1", "--rollout.ahead=1"
    assert run(model, *pools, *apart, *SAMPLED, f"--json={file}") == 0
    made = json.loads(file.read_text())
    assert made["divisions"][1]["trainer"] == 2
    names = {name.split()[0] for name in made["total_bytes"]}
    assert names == {"prefill", "decode", "empty", "accumulate", "apply"}
    assert "best: 1 samplers of 2, 2 devices train" in capsys.readouterr().out
