"""An MCP server over stdio, for tests."""

import asyncio
import logging
import os
import time

from mcp.server import MCPServer
from mcp_types import ToolAnnotations

SERVER = MCPServer("sums", log_level="CRITICAL")
COUNT = 0
MET = asyncio.Event()
WAITING = 0


@SERVER.tool()
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


@SERVER.tool()
def count() -> str:
    """Counts its calls."""
    global COUNT
    COUNT += 1
    return str(COUNT)


@SERVER.tool()
def pid() -> str:
    """Tells the server's process."""
    return str(os.getpid())


@SERVER.tool()
def end() -> str:
    """Ends the server."""
    os._exit(1)


@SERVER.tool()
async def end_once(marker: str, meeting: int = 0) -> str:
    """Ends the server when so many calls meet, unless it did already."""
    while meeting > WAITING and not os.path.exists(marker):
        await asyncio.sleep(0.01)
    if not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(1)
    return "survived"


@SERVER.tool()
def wait(seconds: float) -> str:
    """Waits."""
    time.sleep(seconds)
    return "waited"


@SERVER.tool(annotations=ToolAnnotations(read_only_hint=True))
async def meet(at: int, parties: int) -> str:
    """Waits until so many calls are running."""
    global WAITING
    WAITING += 1
    if parties == WAITING:
        MET.set()
    await asyncio.wait_for(MET.wait(), 20)
    return f"met {at}"


if __name__ == "__main__":
    logging.disable()
    SERVER.run("stdio")
