"""Models and checkpoints to model directories: `python -m launch.convert`."""

import os
import sys

import tyro

from launch import cli


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    # Host memory is enough, and an accelerator may be busy with the run itself.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxrl_post.train.convert import ConvertConfig, convert
    from jaxrl_post.train.run import RUN_ERRORS

    return cli.call(
        ConvertConfig(input=tyro.MISSING, output=tyro.MISSING),
        convert,
        program="launch.convert",
        description="Writes a Hugging Face directory or an Orbax model directory, from "
        "one of either kind or from a checkpoint of a run.",
        errors=RUN_ERRORS,
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
