"""Predicts the seconds of a step: the roofline of every program."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_post.config.plan import PlanConfig, PlannedRates
from jaxrl_post.programs.planning.chips import Chip, Times, Work
from jaxrl_post.programs.planning.compiling import ProgramPlan

__all__ = ["Budget", "apart_assumptions", "assumptions", "budget", "phases", "times"]

SECONDS_OF_DAY = 86400


class Budget(NamedTuple):
    """Steps, samples and tokens of a run of some days.

    Attributes:
        days: of the run.
        steps: whole steps.
        samples: of all steps.
        trained: tokens of prompts and completions, a prompt with each of its samples.
        sampled: tokens of completions.
    """

    days: float
    steps: int
    samples: int
    trained: int
    sampled: int


def budget(config: PlanConfig, step: float) -> Budget | None:
    """The budget of the run; None without --days or the samples of a step.

    Args:
        config: the options.
        step: seconds of a step.
    """
    rollout = config.rollout
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    if not (config.days and samples and step):
        return None
    steps = int(config.days * SECONDS_OF_DAY / step)
    tokens = steps * samples * (config.mean_tokens or rollout.max_tokens)
    prompts = steps * samples * rollout.max_prompt_tokens
    return Budget(config.days, steps, steps * samples, prompts + tokens, tokens)


def times(entry: ProgramPlan, chip: Chip) -> Times | None:
    """Seconds of all calls of a program in a step; None if its work is not counted."""
    if entry.flops is None or entry.memory_bytes is None:
        return None
    work = Work(entry.flops, entry.memory_bytes, float8=entry.float8_flops)
    return chip.times(work * entry.calls, entry.calls * entry.link_bytes)


def phases(plans: Sequence[ProgramPlan], chip: Chip) -> dict[str, float]:
    """Seconds of every phase of a step, and of the `step`, their sum.

    A phase is named by the first word of its programs, and has their overhead. Without
    a count of the work there is no phase.
    """
    found: dict[str, float] = {}
    for entry in plans:
        spent = times(entry, chip)
        if spent is not None:
            phase = entry.name.split()[0]
            spent_s = spent.seconds + entry.calls * entry.overhead
            found[phase] = found.get(phase, 0.0) + spent_s
    return {**found, "step": sum(found.values())} if found else {}


def assumptions(
    config: PlanConfig, chip: Chip, *, counted: bool = False
) -> tuple[str, ...]:
    """Lists the prediction's assumptions, in sentences.

    Args:
        config: the options.
        chip: gives the rates.
        counted: whether collectives are counted from shapes, and not compiled.
    """
    rollout, mean = config.rollout, config.mean_tokens
    lengths = f" (mean {mean}, one of a sampler the longest)" if mean else ""
    links = (
        "Bytes over links are counted from shapes, as a ring receives them, at least; "
        "compiled programs received up to 1.8 times as many. A collective uses all "
        "links of a chip, or of the network of its hosts."
        if counted
        else "Bytes over links are counted from the compiled collectives (publish: "
        "from its plan), loops times their trips; a collective uses all links of a "
        "chip."
    )
    if chip.slower > 1:
        links += (
            f" Nodes have {chip.of_host} GPUs, each with a network of its own; a byte "
            f"over it counts as {chip.slower:g} over links. A ring with d GPUs on each "
            "of its nodes receives over d networks."
        )
    reached = config.rates
    peak = "Peak rates"
    if reached != PlannedRates():
        peak = (
            f"Rates, by --rates {reached.compute:g} of the peak FLOP/s, "
            f"{reached.memory:g} of the memory's and {reached.links:g} of the links' "
            "bandwidth,"
        )
    rates = (
        f"{peak} of a chip: {chip.flops / 1e12:g} TFLOP/s in bfloat16, "
        f"{chip.memory_bandwidth / 1e9:g} GB/s of HBM, "
        f"{chip.link_bandwidth / 1e9:g} GB/s received over all links together "
        f"({chip.source})."
    )
    step = (
        f"A step samples {rollout.prompts_per_step} prompts x "
        f"{rollout.samples_per_prompt}, each of {rollout.max_prompt_tokens} prompt "
        f"tokens and {rollout.max_tokens} decoded tokens{lengths}."
        if rollout.prompts_per_step
        else "A step is one microbatch, and the loss counts all of its tokens."
    )
    return (
        rates,
        step,
        "Computation, memory and links of a program overlap completely; programs do "
        "not overlap. No time for judging, packing or the host.",
        "FLOPs and bytes of memory are counted from the shapes of matrix products, "
        "attention, cache and optimizer; other operations are free.",
        links,
        "Experts are chosen at random and equally often.",
    )


def apart_assumptions(config: PlanConfig, chip: Chip) -> tuple[str, ...]:
    """Lists what a prediction with --samplers takes for granted, in sentences."""
    ahead, network = config.rollout.ahead, config.network
    sent = (
        f"A host sends and receives {network.bytes_per_s / 1e9:g} GB/s, and a step "
        f"changes {network.changed:.3g} of the parameters. No time for copies to the "
        "host, digests, and deltas."
        if config.remote
        else "All samplers receive a version over links, while the trainer sends it."
    )
    return (
        "A step takes the longest of training, sampling and publishing, and at least "
        f"1/{1 + ahead} of the three together (--rollout.ahead {ahead}).",
        "A sampler has its share of the prompts, and without --rollout.num-slots slots "
        "for these alone; in a run each then has slots for all samples of a step.",
        sent,
        f"A run with a number of samplers is one process, so at most {chip.of_host} "
        "devices of a host. With any:N each sampler is one process, and the trainer "
        "may have several.",
        "Divisions that --mesh cannot fill are left out; dp-1 or fsdp-1 fills most.",
    )
