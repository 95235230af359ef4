"""A model uses the tools of an MCP server; the run waits for a person, and goes on where that server is long gone.

    python examples/neighbours/mcp_tools.py

The server is this file, started over stdio. It says that `cabins` only reads, and leaves open what `book` does: so
that is done at most once. The model is a script.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import killick
from killick.testing import call, scripted


def serve(bookings: Path) -> None:
    from mcp.server.mcpserver import MCPServer
    from mcp.types import ToolAnnotations

    ferry = MCPServer("ferry", log_level="ERROR")

    @ferry.tool(annotations=ToolAnnotations(read_only_hint=True))
    def cabins(to: str) -> list[str]:
        """Which cabins are free."""
        return ["4a", "7c"]

    @ferry.tool()
    def book(cabin: str) -> str:
        """Book a cabin."""
        with bookings.open("a") as file:
            file.write(f"{cabin}\n")
        return f"cabin {cabin} is yours"

    ferry.run()


def travel_agent(ferry: Any) -> Any:
    model = scripted(call("cabins", to="Oslo"), call("book", cabin="7c"), "Booked 7c to Oslo.")

    @killick.agent
    async def travel(run: killick.Run, wish: str) -> str:
        tools = await ferry.offered(run)  # on record, as everything that the model is told
        result = await killick.loop(run, model, tools, messages=wish, provider="openai")
        answer = await run.ask(f"{result.text} Keep it?")
        return result.text if answer.approved else "Never mind."

    return travel


def main(folder: Path) -> None:
    from killick.adapters.mcp import Server

    bookings, wish = folder / "bookings", "A cabin to Oslo, please."
    with Server([sys.executable, __file__, str(bookings)]) as ferry, killick.open(folder / "killick.db") as kd:
        try:
            kd.run(travel_agent(ferry), wish, id="trip")
        except killick.RunWaiting as waiting:
            print(waiting)
    with killick.open(folder / "killick.db") as kd:  # days later: steps on record need no server
        kd.answer("trip", "approve", by="ann")
        print(kd.run(travel_agent(Server(["long-gone"])), wish, id="trip"))
    print("booked:", bookings.read_text().split())


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
