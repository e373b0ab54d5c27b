"""Writes the report of a run again, or compares runs: `launch.report runs/demo`."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from launch import cli


@dataclass(frozen=True)
class ReportConfig:
    """The run to report on, or the runs to compare.

    Attributes:
        run_dirs: directories of finished or running runs. Of one, its report is
            written; of several, a page with their curves in the same charts, the
            options that differ, and paired tests of their last evaluations against the
            first run's.
        title: heading of the page; None for the directories' names.
        output: the page, a file whose name ends in .html; None for report.html in the
            directory of one run, and for comparison.html here of several.
    """

    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    title: str | None = None
    output: str | None = None


def report(config: ReportConfig, *, console: Console, command: str = "") -> None:
    """Writes the page and prints its path."""
    from jaxrl_post.records.directory import RunDirectory
    from jaxrl_post.records.report import write_report
    from jaxrl_post.records.report.comparison import write_comparison

    del command
    directories = [RunDirectory(Path(each)) for each in config.run_dirs]
    if not directories:
        raise ValueError("run_dirs: give the --run-dir of a run, or of several")
    for directory in directories:
        if not directory.metrics.exists():
            raise ValueError(
                f"run_dirs: {directory.path} is no run directory, it has no "
                f"{directory.metrics.name}; give the --run-dir of a run"
            )
    output = None if config.output is None else Path(config.output)
    if output is not None and output.suffix != ".html":
        raise ValueError(
            f"--output: must end in .html, as it is replaced by the page; got {output}"
        )
    if len(directories) == 1:
        path = write_report(directories[0], output, title=config.title)
    else:
        output = output or Path("comparison.html")
        path = write_comparison(directories, output, title=config.title)
    console.print(f"report: {path}", markup=False, highlight=False)


PROGRAM = cli.Program(
    name="launch.report",
    description="Writes the report of a run from its files; of several runs, a page "
    "that compares them.",
    default=lambda arguments: ReportConfig(run_dirs=tyro.MISSING),
    load=lambda: (report, (ValueError, OSError)),
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.call(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
