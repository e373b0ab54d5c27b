"""Predicts the seconds of a step: the roofline of every program."""

from collections.abc import Sequence

from jaxrl_post.config.plan import PlanConfig
from jaxrl_post.programs.planning.chips import Chip, Times, Work
from jaxrl_post.programs.planning.compiling import ProgramPlan

__all__ = ["assumptions", "phases", "times"]


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


def assumptions(config: PlanConfig, chip: Chip) -> tuple[str, ...]:
    """Lists the prediction's assumptions, in sentences."""
    rollout = config.rollout
    rates = (
        f"Peak rates of a chip: {chip.flops / 1e12:g} TFLOP/s in bfloat16, "
        f"{chip.memory_bandwidth / 1e9:g} GB/s of HBM, "
        f"{chip.link_bandwidth / 1e9:g} GB/s received over all links together "
        f"({chip.source})."
    )
    step = (
        f"A step samples {rollout.prompts_per_step} prompts x "
        f"{rollout.samples_per_prompt}, each of {rollout.max_prompt_tokens} prompt "
        f"tokens and {rollout.max_tokens} decoded tokens."
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
        "Bytes over links are counted from the compiled collectives (publish: from "
        "its plan), loops times their trips; a collective uses all links of a chip.",
        "Experts are chosen at random and equally often.",
    )
