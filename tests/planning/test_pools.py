"""Divisions of the devices among trainer and samplers: sums by hand, and laws."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post import models
from jaxrl_post.config.plan import (
    PlanConfig,
    PlanError,
    PlannedNetwork,
    PlannedRollout,
)
from jaxrl_post.models import ModelConfig
from jaxrl_post.pretrained.families import write_config
from jaxrl_post.programs.build.layouts import gathered_bytes
from jaxrl_post.programs.planning import pools
from jaxrl_post.programs.planning.chips import Chip, Work, named_devices
from jaxrl_post.programs.planning.pools import Division, Pace
from jaxrl_post.programs.planning.sampling import make_sampler
from jaxrl_post.programs.planning.training import make_trainer
from jaxrl_post.programs.planning.work import ModelWork
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh, per_device_bytes
from launch import plan

CONFIG = ModelConfig("llama", 128, 64, 128, 2, num_heads=8, num_kv_heads=4)
# 8 x 4 samples of 24 and 40 tokens, by samplers of two devices.
ROLLOUT = PlannedRollout(
    prompts_per_step=8,
    samples_per_prompt=4,
    max_prompt_tokens=24,
    max_tokens=40,
    mesh="tp2",
    ahead=1,
)
# A byte of memory per second, and nothing else takes time.
MEMORY = Chip(1e30, 1.0, 1e30, "a page")


def planned(**options) -> PlanConfig:
    options = {"samplers": 2, "rollout": ROLLOUT, "mesh": "fsdp-1"} | options
    return PlanConfig("tiny", "v5e:2x4", row_tokens=128, **options)


@pytest.mark.parametrize(
    ("ahead", "parts", "step", "idle"),
    [
        # Training 3 s, sampling 6 s, publishing 1 s, one after the other.
        (0, (3.0, 6.0, 1.0), 10.0, (0.7, 0.4)),
        # At the same time: the longer one, since a half of all three is 5.
        (1, (3.0, 6.0, 1.0), 6.0, (0.5, 0.0)),
        (1, (8.0, 2.0, 1.0), 8.0, (0.0, 0.75)),
        # As fast as each other: a step waits for half of publishing, (4 + 4 + 2) / 2.
        (1, (4.0, 4.0, 2.0), 5.0, (0.2, 0.2)),
        # Two steps ahead it is hidden, unless it is the longest.
        (2, (4.0, 4.0, 2.0), 4.0, (0.0, 0.0)),
        (3, (2.0, 4.0, 8.0), 8.0, (0.75, 0.5)),
    ],
)
def test_a_step_and_idle_shares_by_hand(ahead, parts, step, idle):
    pace = Pace(*parts, ahead=ahead)
    assert pace.step == step
    assert pace.idle == pytest.approx(idle)


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_the_pace_is_that_of_a_run(ahead):
    """`Pace.step` is what a step takes of `rollout.ahead`, followed for many steps."""
    for train, sample, publish in itertools.product((1, 3, 5), (2, 4), (0, 1, 6)):
        steps, begun, sampled, trained, sent, last = 400, {}, {}, 0.0, 0.0, 0.0
        for number in range(1, steps + 1):
            # A version is sent when the version before it has arrived.
            sent = max(trained, sent) + publish
            for batch in range(len(begun) + 1, number + ahead + 1):
                begun[batch] = sent
                last = sampled[batch] = max(last, sent) + sample
            trained = max(trained, sampled[number]) + train
        found = trained / steps
        assert found == pytest.approx(
            Pace(train, sample, publish, ahead).step, rel=0.05
        )


def division(step: float, size: int, samplers: int = 1) -> Division:
    return Division(2, samplers, 1, Pace(step, 0, 0), ({"all": size}, {"cache": 1}))


def test_the_best_division_is_the_fastest_that_fits():
    found = [division(9.0, 50, 0), division(2.0, 101), division(4.0, 100)]
    assert pools.best(found, 100) is found[2]
    assert pools.best(found, 49) is None


def test_numbers_of_samplers():
    # Eighths of 64 devices, and 4 for one side; 2 and 1 are no sampler of four.
    assert pools.divisions(64, 4) == (1, 2, 4, 6, 8, 10, 12, 14, 15)
    # Three and five eighths of 16 are no pairs.
    assert pools.divisions(16, 4) == (1, 2, 3)


def sent(samplers: int | str, trainer: int, changed: float = 0.1) -> tuple:
    """Bytes and seconds of 100 numbers in bfloat16, over samplers of two devices."""
    mesh = create_mesh("tp2", jax.devices()[:2])
    number = jax.ShapeDtypeStruct(
        (100,), jnp.bfloat16, sharding=NamedSharding(mesh, P("tp"))
    )
    # Four devices a host; links of 10 bytes a second, 2 to other hosts.
    chip = Chip(1.0, 1.0, 10.0, "a page", 4, 5.0)
    network = PlannedNetwork(bytes_per_s=8.0, changed=changed)
    config = planned(samplers=samplers, network=network)
    return dataclasses.astuple(pools.publication(config, [number], trainer, chip))


def test_a_version_over_links_by_hand():
    # Each of two devices receives 100 bytes, from as many or more of the trainer.
    assert sent(1, 2) == (200, 200, 100 / 10)
    # Eight devices on two hosts: a fifth of the rate.
    assert sent(2, 4) == (200, 200, 100 / 2)
    # Two devices send to four.
    assert sent(2, 2) == (200, 200, 2 * 100 / 2)


def test_a_version_over_the_network_by_hand():
    # A tenth of 100 numbers: 2 bytes each, and 2 for how many are skipped.
    assert sent("any:1", 4) == (200, 40, 40 / 8)
    # The trainer sends it twice, for any number of samplers.
    assert sent("any:9", 4) == (200, 40, 2 * 40 / 8)
    # Two hosts of the trainer send a half each; a host of two samplers gets all twice.
    assert sent("any:1", 8) == (200, 40, 40 / 8)
    assert sent("any:9", 8) == (200, 40, 2 * 40 / 8)
    # A delta of all numbers would be larger than the version.
    assert sent("any:9", 4, changed=1.0) == (200, 200, 2 * 200 / 8)


@pytest.fixture(scope="module")
def divided() -> list[Division]:
    return pools.divide(planned(), CONFIG, MEMORY)


def test_the_divisions_of_eight_devices(divided):
    # Samplers of two devices; fsdp-1 fills two, four and six of the model's 64.
    assert [(each.trainer, each.samplers, each.each) for each in divided] == [
        (8, 0, 0),
        (4, 2, 2),
        (2, 3, 2),
    ]


def seconds(programs) -> float:
    """The bytes of memory of all calls, which is the seconds of `MEMORY`."""
    return sum(each.calls * each.work.bytes for each in programs)


def test_each_side_is_planned_as_if_it_were_alone(divided):
    alone = dataclasses.replace(ROLLOUT, mesh="", prompts_per_step=4)
    config = planned(samplers=0, rollout=alone)
    sampler = make_sampler(config, CONFIG, create_mesh("tp2", jax.devices()[:2]))
    assert sampler is not None
    four = create_mesh("fsdp4", jax.devices()[:4])
    trainer = make_trainer(planned(), CONFIG, four)
    half = divided[1]
    # A sampler has a half of the prompts, and the trainer has all samples.
    assert half.pace.sample == seconds(sampler.programs(sampler.params, ()))
    assert half.pace.train == seconds(trainer.programs(()))
    assert half.pace.step == max(half.pace.train, half.pace.sample)
    training, sampling = half.memory
    assert training == trainer.memory
    # The version that samples, and the one that comes. A burst's view has 48 tokens of
    # 16 samples and 32 of four prompts, of two heads of 8 numbers in two layers.
    assert sampling == {
        "copies": 2 * per_device_bytes(sampler.params),
        "cache": per_device_bytes(sampler.pages),
        "view": (16 * 48 + 4 * 32) * 2 * 2 * (8 + 8) * 2,
    }


def test_each_decoding_step_takes_longer_by_what_a_count_leaves_out(divided):
    slow = pools.divide(planned(step_overhead_s=2.0), CONFIG, MEMORY)
    # Two bursts of twenty tokens, for each number of samplers.
    more = [
        after.pace.sample - before.pace.sample
        for before, after in zip(divided, slow, strict=True)
    ]
    assert more == pytest.approx([2 * 20 * 2.0] * 3)
    assert slow[1].pace.train == divided[1].pace.train


def test_in_turns_the_samplers_layout_is_on_all_devices(divided):
    together = dataclasses.replace(ROLLOUT, mesh="dp4,tp2", ahead=0)
    config = planned(samplers=0, rollout=together)
    assert divided[0] == pools.divide(config, CONFIG, MEMORY)[0]
    pace = divided[0].pace
    assert pace.step == pytest.approx(pace.train + pace.sample + pace.publish)
    # Gradients and activations are gone while the sampler has its view.
    training, sampling = divided[0].memory
    assert sampling.keys() - training.keys() == {"view"}
    assert training.keys() - sampling.keys() == {
        "gradients",
        "activations",
        "vocabulary",
    }
    assert all(sampling[name] == training[name] for name in sampling if name != "view")


def test_samplers_in_other_processes_need_a_copy_of_what_is_sent(divided):
    remote = pools.divide(planned(samplers="any:2"), CONFIG, MEMORY)[1]
    assert remote.memory[0].pop("copies") == remote.memory[0]["parameters"]
    assert remote.memory == divided[1].memory
    assert remote.pace.train == divided[1].pace.train


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samplers": 4}, r"--samplers: 4 samplers of 2 devices leave none of 8"),
        ({"rollout": PlannedRollout(mesh="tp2")}, r"give --rollout.prompts-per-step"),
        (
            {"rollout": dataclasses.replace(ROLLOUT, mesh="dp-1,tp2")},
            r"--rollout.mesh: .* each axis needs a size; got 'dp-1,tp2'",
        ),
    ],
)
def test_divisions_that_cannot_be_planned(options, said):
    with pytest.raises(PlanError, match=said):
        pools.divide(planned(**options), CONFIG, MEMORY)


def test_the_longest_answer_keeps_a_sampler_and_the_mean_the_trainer():
    whole, mixed = (
        make_trainer(planned(mean_tokens=mean), CONFIG, create_mesh("fsdp8"))
        for mean in (0, 20)
    )
    # 32 samples of 64 tokens, two a row of 128; of 44 they fill eleven rows.
    assert (whole.microbatches, mixed.microbatches) == (2, 2)
    assert (whole.scored, mixed.scored) == (32 * 40 / 2, 32 * 20 / 2)
    assert whole.seen is None
    # Answers of 0 to 40 tokens after 24: the mean square of 24 to 64, by their mean.
    square = (64**3 - 24**3) / (3 * 40)
    assert mixed.seen == pytest.approx(square / (2 * 44), rel=0.01)

    def calls(mean: int) -> dict[str, int]:
        config = planned(samplers=0, mean_tokens=mean)
        mesh = create_mesh("tp2", jax.devices()[:2])
        sampler = make_sampler(config, CONFIG, mesh)
        assert sampler is not None
        programs = sampler.programs(sampler.params, ())
        return {each.name: each.calls for each in programs if "decode" in each.name}

    # Bursts of 20 tokens. About half of the answers are over after the first.
    assert calls(0) == {"decode 32 x 32 + 48": 2}
    assert calls(20) == {"decode 32 x 32 + 48": 1, "decode 16 x 32 + 48": 1}


def test_gathered_weights_are_received_at_every_step_of_decoding():
    mesh = create_mesh("fsdp8")
    rules = DEFAULT_RULES.with_context_as_batch()
    work = ModelWork(CONFIG, mesh, rules, jnp.dtype("bfloat16"))
    params = models.abstract(models.param_specs(CONFIG), jnp.bfloat16, mesh)
    norms = gathered_bytes([leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 1])
    once = gathered_bytes(params.embedding)
    every = gathered_bytes(params) - norms - once
    assert work.decode(8, 16, 5).received == 5 * every + once


def test_sums_over_tp_by_hand():
    work = ModelWork(
        CONFIG, create_mesh("dp2,tp4"), DEFAULT_RULES, jnp.dtype("bfloat16")
    )
    # Attention and MLP of two layers: four tokens of 64 values in bfloat16. A ring of
    # four receives three quarters of them twice.
    sums = 2 * 2 * (4 * 64 * 2) * 3 / 4 * 2
    assert work.decode(8, 16, 1).received == sums
    # Products with codes sum float32, before they are scaled.
    codes = dataclasses.replace(work, bytes_of_weights=True)
    assert codes.decode(8, 16, 1).received == 2 * sums
    # Twice forward and twice backward; a forward pass again lacks the last product's.
    # Gradients of a device's parameters are summed over dp2.
    owned = sum(each.size for each in work.products())
    gradients = 2 * 0.5 * owned * 2
    found = work.accumulate(8, 16, 8, "full", scan=False)
    assert found.received == (16 * sums) * (2 + 0.5) + gradients


@pytest.mark.parametrize(
    ("mesh", "axes", "slower"),
    [
        # Four devices a host: tp4 is one host, and each pair of fsdp2 is on two.
        ("fsdp2,tp4", ("tp",), 1.0),
        ("fsdp2,tp4", ("fsdp",), 8.0),
        # Each of four devices of a host takes a quarter over its own network.
        ("tp8", ("tp",), 2.0),
        ("dp2,fsdp4", ("dp", "fsdp"), 2.0),
        ("dp2,fsdp2,tp2", ("fsdp",), 1.0),
    ],
)
def test_what_leaves_a_host_takes_longer(mesh, axes, slower):
    chip = Chip(1.0, 1.0, 1.0, "a page", 4, 8.0)
    made = create_mesh(mesh)
    work = ModelWork(CONFIG, made, DEFAULT_RULES, jnp.dtype("bfloat16"), chip=chip)
    assert work.slower(*axes) == slower


def test_work_adds_up():
    assert Work(1, 2, 3) + Work(4, 5, 6) * 2 == Work(9, 12, 15)


def test_devices_that_have_only_a_name():
    assert len(named_devices("v5p:4x4x4")) == len(named_devices("h100:64")) == 64
    for topology in ("v5p", "v5p:4xx", "h100:0", "a100:8"):
        with pytest.raises(PlanError, match=rf"--topology: .* got '{topology}'"):
            named_devices(topology)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(write_config(CONFIG)))
    return tmp_path


STEP = (
    "--rollout.prompts-per-step=8",
    "--rollout.samples-per-prompt=4",
    "--rollout.max-prompt-tokens=24",
    "--rollout.max-tokens=40",
    "--row-tokens=128",
)


def run(folder: Path, *arguments: str) -> int:
    return plan.main([f"--model={folder}", *STEP, *arguments])


def test_the_command_counts_and_names_the_best_division(tiny, capsys):
    file = tiny / "plan.json"
    apart = "--samplers=any:2", "--rollout.mesh=tp2", "--rollout.ahead=1"
    cluster = "--topology=h100:8", "--no-compile"
    assert run(tiny, *cluster, *apart, f"--json={file}") == 0
    printed = capsys.readouterr().out
    assert "8 x NVIDIA H100" in printed
    for line in ("the same", "2 x 2", "3 x 2", "best: ", "in turns on the same"):
        assert line in printed
    assert "With any:N each sampler is one process" in printed
    made = json.loads(file.read_text())
    assert [each["samplers"] for each in made["divisions"]] == [0, 2, 3]
    assert all(each["step"] > 0 for each in made["divisions"])
    assert made["programs"] == []
    # The phases of the division that was asked for, one after the other.
    pace, seconds = made["divisions"][1]["pace"], made["prediction"]["seconds"]
    assert seconds["prefill"] + seconds["decode"] == pytest.approx(pace["sample"])
    assert (seconds["publish"], seconds["step"]) == (
        pace["publish"],
        made["divisions"][1]["step"],
    )


def test_without_compiling_a_step_in_turns_is_counted(tiny, capsys):
    assert run(tiny, "--topology=v5e:2x4", "--no-compile") == 0
    printed = capsys.readouterr().out
    assert "the same" in printed
    assert "best" not in printed
    assert "--samplers" not in printed


def test_a_counted_step_that_does_not_fit(tmp_path, capsys):
    wide = dataclasses.replace(CONFIG, vocab_size=3 * 2**21)
    (tmp_path / "config.json").write_text(json.dumps(write_config(wide)))
    assert run(tmp_path, "--topology=v5e:2x2", "--no-compile", "--mesh=dp4") == 1
    assert "error: does not fit: at least " in capsys.readouterr().out
