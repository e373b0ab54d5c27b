"""A model behind OpenAI's API: `python -m launch.serve --model runs/demo/model`."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from jaxrl_post.config.serve import ServeConfig, check_server
from launch import cli
from launch.several import several


def load() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """Imports the function that does the work, as `Program.load`."""
    from jaxrl_post.programs.build.compile_cache import compile_cache
    from jaxrl_post.programs.run import RUN_ERRORS
    from jaxrl_post.programs.serve import run_server

    def serve(config: ServeConfig, *, console: Console, command: str) -> None:
        cached = functools.partial(compile_cache, config.compile_cache, os.environ)
        if config.follow is None:
            with cached(console):
                run_server(config, console=console, command=command)
            return
        with several(config.processes, console, RUN_ERRORS) as shown, cached(shown):
            run_server(config, console=shown, command=command)

    return serve, RUN_ERRORS


PROGRAM = cli.Program(
    name="launch.serve",
    description="Serves a model over HTTP, as OpenAI's API (responses, chat, "
    "completions) and as token ids in and out (/inference/v1/generate); or, with "
    "--follow, samples for a training run on this machine's devices.",
    default=lambda arguments: ServeConfig(),
    load=load,
    check=check_server,
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.call(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
