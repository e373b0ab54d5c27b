"""Converts models and checkpoints to model directories: `python -m launch.convert`."""

import os
import sys
from collections.abc import Callable
from typing import Any

import tyro

from jaxrl_post.config.convert import ConvertConfig
from launch import cli


def load() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """Imports the function that does the work, as `Program.load`."""
    # Run on the CPU: an accelerator may be busy with the run itself.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxrl_post.programs.convert import convert
    from jaxrl_post.programs.run import RUN_ERRORS

    return convert, RUN_ERRORS


PROGRAM = cli.Program(
    name="launch.convert",
    description="Writes a Hugging Face directory or an Orbax model directory, from "
    "one of either kind, from a GGUF file or from a checkpoint of a run.",
    default=lambda arguments: ConvertConfig(input=tyro.MISSING, output=tyro.MISSING),
    load=load,
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.call(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
