"""An MCP server for tests: a bank whose ledger is a file, so that what it really did can be counted.

    python bank.py LEDGER               over stdio
    python bank.py LEDGER http PORT     over streamable HTTP

`die` beside the ledger makes it die once: "after pay" when the money is gone and before it says so, "in balance"
before it answers. `slow NAME` beside it makes it hold its answer to a payment to NAME until it is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import BaseModel, Field


class Line(BaseModel):
    to: str
    amount: int


def made(ledger: Path) -> MCPServer:
    bank = MCPServer("bank", log_level="ERROR")

    def die(where: str) -> None:
        wish = ledger.with_name("die")
        if wish.exists() and wish.read_text() == where:
            wish.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def write(line: str) -> None:
        with ledger.open("a") as file:
            file.write(line + "\n")

    @bank.tool(annotations=ToolAnnotations(read_only_hint=True))
    def balance() -> int:
        """What is left."""
        write("balance")
        die("in balance")
        return 100 - ledger.read_text().count("paid")

    @bank.tool(annotations=ToolAnnotations(idempotent_hint=True))
    def set_limit(amount: int) -> str:
        """Say how much may be paid at once."""
        write(f"limit {amount}")
        return f"at most {amount}"

    @bank.tool()
    def pay(to: str, amount: Annotated[int, Field(description="In euros.")], ctx: Context[Any, Any]) -> str:
        """Pay somebody."""
        if amount > 50:
            raise ToolError(f"{amount} is more than there is")
        meta: Any = ctx.request_context.meta or {}
        write(f"paid {amount} to {to} under {meta.get('killick/key', 'no key')}")
        die("after pay")
        while ledger.with_name(f"slow {to}").exists():
            time.sleep(0.005)
        return f"paid {amount} to {to}"

    @bank.tool(name="transfer.many", structured_output=True)
    def transfer_many(lines: list[Line], request_id: str = "none") -> dict[str, int]:
        """Pay several at once."""
        write(f"transferred under {request_id}")
        return {line.to: line.amount for line in lines}

    @bank.tool(structured_output=False)
    def statement() -> list[Any]:
        """A picture of the account."""
        return ["as of today", Image(data=b"\x89PNG", format="png")]

    return bank


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.with_name("pid").write_text(str(os.getpid()))
    if sys.argv[2:]:
        made(path).run("streamable-http", port=int(sys.argv[3]), json_response=True)
    else:
        made(path).run()
