"""An MCP server with a till: it counts in a file what it was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

from mcp.server import MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("till")
FILE = Path(sys.argv[1])


def _count(what: str) -> str:
    with FILE.open("a") as out:
        out.write(f"{what}\n")
    return what


@server.tool()
def pay(to: str, amount: int) -> str:
    """Pay somebody."""
    return _count(f"paid {amount} to {to}")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def balance() -> str:
    """What is left."""
    return _count("looked")


if __name__ == "__main__":
    server.run("stdio")
