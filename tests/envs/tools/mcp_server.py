"""An MCP server over stdio, for tests."""

import logging
import os
import time

from mcp.server import MCPServer

SERVER = MCPServer("sums", log_level="CRITICAL")
COUNT = 0


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
def end_once(marker: str) -> str:
    """Ends the server, unless it did already."""
    if not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(1)
    return "survived"


@SERVER.tool()
def wait(seconds: float) -> str:
    """Waits."""
    time.sleep(seconds)
    return "waited"


if __name__ == "__main__":
    logging.disable()
    SERVER.run("stdio")
