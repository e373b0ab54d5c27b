"""Predicts the seconds of a step: the roofline of every program."""

from collections.abc import Sequence

from jaxrl_post.config.plan import PlanConfig
from jaxrl_post.programs.planning.chips import Chip, Times, Work
from jaxrl_post.programs.planning.compiling import ProgramPlan

__all__ = ["apart_assumptions", "assumptions", "phases", "times"]


def times(entry: ProgramPlan, chip: Chip) -> Times | None:
    """Seconds of all calls of a program in a step; None if its work is not counted."""
    if entry.flops is None or entry.memory_bytes is None:
        return None
    work = Work(entry.calls * entry.flops, entry.calls * entry.memory_bytes)
    return chip.times(work, entry.calls * entry.link_bytes)


def phases(plans: Sequence[ProgramPlan], chip: Chip) -> dict[str, float]:
    """Seconds of every phase of a step, and of the `step`, their sum.

    A phase is named by the first word of its programs. Without a count of the work
    there is no phase.
    """
    found: dict[str, float] = {}
    for entry in plans:
        spent = times(entry, chip)
        if spent is not None:
            phase = entry.name.split()[0]
            found[phase] = found.get(phase, 0.0) + spent.seconds
    return {**found, "step": sum(found.values())} if found else {}


def assumptions(
    config: PlanConfig, chip: Chip, *, counted: bool = False
) -> tuple[str, ...]:
    """Lists the prediction's assumptions, in sentences.

    Args:
        config: the options.
        chip: gives the peak rates.
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
    rates = (
        f"Peak rates of a chip: {chip.flops / 1e12:g} TFLOP/s in bfloat16, "
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
