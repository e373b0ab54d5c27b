"""A conversation with a model: `python -m launch.chat runs/demo`."""

import os
import sys
from collections.abc import Callable
from typing import Any

import tyro
from rich.console import Console

from jaxrl_post.config.serve import ChatConfig, check_chat
from launch import cli


def load() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """Imports the function that does the work, as `Program.load`."""
    from jaxrl_post.envs.sandbox import SandboxError
    from jaxrl_post.programs.build.compile_cache import compile_cache
    from jaxrl_post.programs.chat import run_chat
    from jaxrl_post.programs.run import RUN_ERRORS

    def chat(config: ChatConfig, *, console: Console, command: str) -> None:
        with compile_cache(config.compile_cache, os.environ, console):
            run_chat(config, console=console, command=command)

    return chat, (*RUN_ERRORS, SandboxError)


PROGRAM = cli.Program(
    name="launch.chat",
    description="Talks to a model in the terminal: python -m launch.chat RUN_OR_MODEL.",
    default=lambda arguments: ChatConfig(model=tyro.MISSING),
    load=load,
    check=check_chat,
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    return cli.call(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
