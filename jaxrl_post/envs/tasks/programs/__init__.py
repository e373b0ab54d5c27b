"""Tasks that are solved by writing a program."""

from jaxrl_post.envs.tasks.programs.calculate import calculate
from jaxrl_post.envs.tasks.programs.code import Code
from jaxrl_post.envs.tasks.programs.functions import Functions

__all__ = ["Code", "Functions", "calculate"]
