"""Tools that a policy may call; imports no jax."""

from jaxrl_post.envs.tools.catalog import make_toolset
from jaxrl_post.envs.tools.endpoint import Endpoint
from jaxrl_post.envs.tools.environment import ToolEnvironment
from jaxrl_post.envs.tools.functions import Functions
from jaxrl_post.envs.tools.interpreter import Interpreter
from jaxrl_post.envs.tools.mcp import McpServer
from jaxrl_post.envs.tools.search import Search
from jaxrl_post.envs.tools.toolset import (
    ERROR_KINDS,
    ErrorKind,
    OpenTools,
    Tool,
    ToolError,
    Toolset,
)

__all__ = [
    "ERROR_KINDS",
    "Endpoint",
    "ErrorKind",
    "Functions",
    "Interpreter",
    "McpServer",
    "OpenTools",
    "Search",
    "Tool",
    "ToolEnvironment",
    "ToolError",
    "Toolset",
    "make_toolset",
]
