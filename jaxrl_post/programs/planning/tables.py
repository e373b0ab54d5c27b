"""Prints plans as tables of 80 columns."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from jaxrl_post.programs.planning.chips import Chip
from jaxrl_post.programs.planning.compiling import ProgramPlan
from jaxrl_post.programs.planning.prediction import phases, times

__all__ = ["print_collectives", "print_memory", "print_prediction"]

GIB = 2**30


def print_collectives(entry: ProgramPlan, console: Console) -> None:
    """Prints the largest collectives of a program, if it has any."""
    if not entry.collectives:
        return
    table = Table(title=f"largest collectives of {entry.name}", title_justify="left")
    table.add_column("kind")
    for name in ("result on a device", "MiB", "times"):
        table.add_column(name, justify="right")
    for each in entry.collectives:
        # Escaped: brackets are rich's markup.
        shape = each.shape.replace("[", r"\[")
        table.add_row(each.kind, shape, f"{each.bytes / 2**20:,.1f}", str(each.count))
    console.print(table)


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
    assumed: Sequence[str],
    console: Console,
) -> None:
    """Prints the predicted seconds of a step, with their assumptions.

    Args:
        made: the programs of the step.
        chip: gives the peak rates.
        assumed: sentences about what the prediction takes for granted.
        console: for messages to the user.
    """
    predicted = phases(made, chip)
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
        table.add_row(
            entry.name, str(entry.calls), *cells, f"{spent.seconds:.3f}", spent.bound
        )
    console.print(table)
    listed = ", ".join(f"{name} {value:.3f} s" for name, value in predicted.items())
    console.print(f"predicted: {listed}", highlight=False)
    for sentence in assumed:
        console.print(f"- {sentence}", highlight=False)
