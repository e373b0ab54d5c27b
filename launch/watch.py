"""A page that follows a run: `python -m launch.watch runs/demo`."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Annotated, Any

import tyro

from jaxrl_post.config.evaluate import LiveConfig, check_live
from launch import cli


@dataclasses.dataclass(frozen=True)
class Options(LiveConfig):
    __doc__ = LiveConfig.__doc__

    run_dir: Annotated[str, tyro.conf.Positional] = tyro.MISSING


def load() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """Imports the function that does the work, as `Program.load`."""
    from jaxrl_post.programs.watching.live import run_live

    return run_live, (ValueError, OSError, ImportError)


PROGRAM = cli.Program(
    name="launch.watch",
    description="Serves a page that follows a run while it trains: curves, alarms, "
    "samples that can be searched, and two evaluations side by side.",
    default=lambda arguments: Options(run_dir=tyro.MISSING),
    load=load,
    check=check_live,
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.call(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
