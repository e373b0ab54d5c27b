"""Prints plans as tables of 80 columns."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from jaxrl_post.programs.planning.chips import Chip
from jaxrl_post.programs.planning.compiling import ProgramPlan
from jaxrl_post.programs.planning.pools import Division, best
from jaxrl_post.programs.planning.prediction import Budget, times
from jaxrl_post.sharding.stages import Schedule

__all__ = [
    "print_budget",
    "print_collectives",
    "print_divisions",
    "print_memory",
    "print_pools",
    "print_prediction",
    "print_schedule",
]

GIB = 2**30
# Characters of a line.
LINE = 80


def print_collectives(entry: ProgramPlan, console: Console) -> None:
    """Prints the largest collectives of a program, if it has any."""
    if not entry.collectives:
        return
    table = Table(title=f"largest collectives of {entry.name}", title_justify="left")
    table.add_column("kind")
    slower = any(each.slower > 1 for each in entry.collectives)
    for name in ("result on a device", "MiB", "times", *(["slower"] if slower else [])):
        table.add_column(name, justify="right")
    for each in entry.collectives:
        # Escaped: brackets are rich's markup.
        shape = each.shape.replace("[", r"\[")
        cells = f"{each.bytes / 2**20:,.1f}", str(each.count), f"{each.slower:.3g}"
        table.add_row(each.kind, shape, *cells[: 3 if slower else 2])
    console.print(table)


def print_schedule(schedule: Schedule, console: Console) -> None:
    """Draws the stages of a pass, as far as they fit in a line."""
    console.print(
        f"pipeline: {schedule.stages} stages with {schedule.rounds} chunks of layers, "
        f"{schedule.microbatches} microbatches: {schedule.ticks} ticks, "
        f"{schedule.bubble:.1%} of them idle; below, the microbatch and the chunk (a, "
        "b, ...) of every stage and tick",
        highlight=False,
    )
    for line in schedule.drawing().splitlines():
        short = (
            line if len(line) <= LINE else line[: LINE - 4].rpartition(" ")[0] + " ..."
        )
        console.print(short, highlight=False, soft_wrap=True)


def print_memory(made: Sequence[ProgramPlan], console: Console) -> None:
    """Prints the memory of each program."""
    parts = ("beside", "arguments", "outputs", "aliased", "temporaries", "code")
    table = Table(title="GiB of a device", title_justify="left", box=None)
    table.add_column("program")
    for name in ("beside", "args", "out", "alias", "temp", "code", "total", "secs"):
        table.add_column(name, justify="right")
    for entry in made:
        sizes = [getattr(entry, part) for part in (*parts, "total")]
        cells = [f"{size / GIB:.2f}" for size in sizes]
        table.add_row(entry.name, *cells, f"{entry.compile_seconds:.0f}")
    console.print(table)


def print_prediction(
    made: Sequence[ProgramPlan],
    chip: Chip,
    predicted: Mapping[str, float],
    assumed: Sequence[str],
    console: Console,
) -> None:
    """Prints the predicted seconds of a step, with their assumptions.

    Args:
        made: the programs of the step.
        chip: gives the rates.
        predicted: seconds by phase.
        assumed: sentences about what the prediction takes for granted.
        console: for messages to the user.
    """
    if not predicted:
        console.print("No prediction: the work of adapters is not counted.")
        return
    table = Table(title="a step, on a device", title_justify="left", box=None)
    table.add_column("program")
    table.add_column("calls", justify="right")
    for name in ("TFLOP", "HBM GB", "link GB", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("bound by")
    for entry in made:
        spent = times(entry, chip)
        if spent is None or entry.flops is None or entry.memory_bytes is None:
            continue
        amounts = (
            entry.flops / 1e12,
            entry.memory_bytes / 1e9,
            entry.link_bytes / 1e9,
        )
        cells = [f"{entry.calls * amount:,.2f}" for amount in amounts]
        seconds = spent.seconds + entry.calls * entry.overhead
        table.add_row(
            entry.name, str(entry.calls), *cells, f"{seconds:.3f}", spent.bound
        )
    console.print(table)
    listed = ", ".join(f"{name} {value:.3f} s" for name, value in predicted.items())
    console.print(f"predicted: {listed}", highlight=False)
    for sentence in assumed:
        console.print(f"- {sentence}", highlight=False)


def print_budget(held: Budget, step: float, console: Console) -> None:
    """Prints how many steps, samples and tokens a run of some days holds."""
    console.print(
        f"in {held.days:g} days: {held.steps:,} steps of {step:.1f} s, "
        f"{held.samples:,} samples, {held.trained / 1e9:.2f} G tokens ("
        f"{held.sampled / 1e9:.2f} G sampled)",
        highlight=False,
    )


def print_pools(planned: Division, console: Console) -> None:
    """Prints what takes the memory of the trainer's devices and of a sampler's."""
    names = dict.fromkeys(name for pool in planned.memory for name in pool)
    table = Table(title="GiB of a device, at least", title_justify="left", box=None)
    pools = [f"{planned.trainer} devices", "while sampling"]
    if planned.samplers:
        pools[1] = f"{planned.samplers} x {planned.each}"
    for name in ("", *pools[: len(planned.memory)]):
        table.add_column(name, justify="right" if name else "left")
    for name in names:
        sizes = [pool.get(name, 0) / GIB for pool in planned.memory]
        table.add_row(name, *(f"{size:.2f}" if size else "" for size in sizes))
    totals = [sum(pool.values()) / GIB for pool in planned.memory]
    table.add_row("total", *(f"{size:.2f}" for size in totals))
    console.print(table)
    sent = planned.publication
    if sent is not None:
        console.print(
            f"a sampler receives {sent.full / 1e9:.2f} GB of a first version, "
            f"{sent.update / 1e9:.2f} GB of each further one; all have it after "
            f"{sent.seconds:.3f} s",
            highlight=False,
        )


def print_divisions(found: Sequence[Division], limit: float, console: Console) -> None:
    """Prints the seconds of divisions of the devices, and names the best.

    Args:
        found: the step without samplers of their own first, if it can be planned.
        limit: bytes of a device.
        console: for messages to the user.
    """
    table = Table(title="seconds of a step", title_justify="left", box=None)
    table.add_column("trainer")
    table.add_column("samplers")
    for name in ("train", "sample", "publish", "step", "idle", "idle", "GiB"):
        table.add_column(name, justify="right")
    for each in found:
        pace, shares = each.pace, ("", "")
        if each.samplers:
            shares = tuple(f"{share:.0%}" for share in pace.idle)
        spent = pace.train, pace.sample, pace.publish, pace.step
        table.add_row(
            str(each.trainer),
            f"{each.samplers} x {each.each}" if each.samplers else "the same",
            *(f"{seconds:.3f}" for seconds in spent),
            *shares,
            f"{each.bytes / GIB:.1f}" + (" no" if each.bytes > limit else ""),
        )
    console.print(table)
    if not any(each.samplers for each in found):
        return
    chosen = best([each for each in found if each.samplers], limit)
    turns = [
        f"{each.pace.step:.3f} s" + (", which does not fit" * (each.bytes > limit))
        for each in found
        if not each.samplers
    ]
    if chosen is None:
        console.print("best: no division fits")
        return
    trainer, samplers = chosen.pace.idle
    console.print(
        f"best: {chosen.samplers} samplers of {chosen.each}, {chosen.trainer} devices "
        f"train: {chosen.pace.step:.3f} s a step, idle {trainer:.0%} and "
        f"{samplers:.0%}; in turns on the same devices: {(*turns, 'not planned')[0]}",
        highlight=False,
    )
