"""Writes the report of a run again: `python -m launch.report runs/demo`."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from launch import cli


@dataclass(frozen=True)
class ReportConfig:
    """The run to report on.

    Attributes:
        run_dir: directory of a finished or a running run.
        title: heading of the page; None for the directory's name.
    """

    run_dir: tyro.conf.Positional[str]
    title: str | None = None


def report(config: ReportConfig, *, console: Console, command: str = "") -> None:
    """Writes report.html and prints its path."""
    from jaxrl_post.records.directory import RunDirectory
    from jaxrl_post.records.report import write_report

    del command
    directory = RunDirectory(Path(config.run_dir))
    if not directory.metrics.exists():
        raise ValueError(
            f"run_dir: {config.run_dir} is no run directory, it has no "
            f"{directory.metrics.name}; give the --run-dir of a run"
        )
    path = write_report(directory, title=config.title)
    console.print(f"report: {path}", markup=False, highlight=False)


PROGRAM = cli.Program(
    name="launch.report",
    description="Writes the report of a run from its files.",
    default=lambda arguments: ReportConfig(run_dir=tyro.MISSING),
    load=lambda: (report, (ValueError, OSError)),
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.call(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
