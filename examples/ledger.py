"""A shop with tables of its own beside the log: what its agent writes there is exactly what the record says it did.

Orders, stock and a ledger are tables in the file of the store. An order and the run that fulfils it come to be in one
transaction of the shop's own. The run's tools write in transactions, each of which ends with the record of what the
tool returned: when the process dies in the middle of one, neither rows nor outcome are there, and the step is simply
made again. Nobody has to find out what happened.
"""

import os
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import killick

TABLES = """
CREATE TABLE orders (number INTEGER PRIMARY KEY, item TEXT NOT NULL, count INTEGER NOT NULL);
CREATE TABLE stock (item TEXT PRIMARY KEY, count INTEGER NOT NULL CHECK (count >= 0));
CREATE TABLE ledger (number INTEGER NOT NULL, euros INTEGER NOT NULL, attempt INTEGER NOT NULL);
INSERT INTO stock VALUES ('lamp', 5), ('rug', 1);
"""


@dataclass
class Order:
    number: int
    item: str
    count: int


# Tools that write in a transaction are given it. Killick commits it, together with what they return, or takes it back.


@killick.tool(effect="transaction")
def take_from_stock(item: str, count: int, tx: killick.Tx = killick.TX) -> int:
    tx.execute("UPDATE stock SET count = count - ? WHERE item = ?", (count, item))
    return int(tx.execute("SELECT count FROM stock WHERE item = ?", (item,)).fetchone()[0])


@killick.tool(effect="transaction")
def book(number: int, euros: int, tx: killick.Tx = killick.TX, step: killick.ToolStep = killick.STEP) -> None:
    tx.execute("INSERT INTO ledger VALUES (?, ?, ?)", (number, euros, step.attempt))
    if os.environ.get("DIES") and step.attempt == 1:
        os._exit(9)  # the row is written, and nothing is committed


@killick.agent
async def fulfil(run: killick.Run, order: Order) -> str:
    try:
        left = await run.call(take_from_stock, order.item, order.count)
    except killick.StepFailed:
        return f"not enough of {order.item}"
    await run.call(book, order.number, order.count * 20)
    return f"{order.count} {order.item} sold, {left} left"


def place(kd: killick.Client, shop: sqlite3.Connection, order: Order) -> None:
    """An order and its run, or neither: `tx=` joins the transaction that is open on the shop's own connection."""
    shop.execute("BEGIN IMMEDIATE")
    try:
        shop.execute("INSERT INTO orders VALUES (?, ?, ?)", (order.number, order.item, order.count))
        kd.start(fulfil, order, id=f"order_{order.number}", tx=shop)
        if order.count > 100:
            raise ValueError("nobody buys that many")
        shop.execute("COMMIT")
    except BaseException:
        shop.execute("ROLLBACK")
        raise


ORDERS = [Order(1, "lamp", 2), Order(2, "rug", 3), Order(3, "lamp", 1000), Order(4, "lamp", 3)]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="killick-") as folder:
        store = str(Path(folder) / "shop.db")
        with killick.open(store) as kd:  # first the store, then the shop's tables in its file
            shop = sqlite3.connect(store, isolation_level=None)
            shop.executescript(TABLES)
            for order in ORDERS:
                try:
                    place(kd, shop, order)
                except ValueError as error:
                    print(f"order {order.number}: {error}")
            print("orders:", [number for (number,) in shop.execute("SELECT number FROM orders")])
            print("runs:  ", sorted(listed.id for listed in kd.list()))

        # A worker dies in the middle of writing to the ledger.
        worker = [sys.executable, __file__, "work", store]
        died = subprocess.run(worker, env={**os.environ, "DIES": "1"}, check=False)
        print("the worker exits with", died.returncode, "and the ledger has", rows(shop, "ledger"))

        # Another one goes on with what it finds.
        subprocess.run(worker, check=True)
        print("ledger:", rows(shop, "ledger"))
        print("stock: ", rows(shop, "stock"))
        with killick.open(store) as kd:
            for number, sold in ((1, 40), (4, 60)):
                assert shop.execute("SELECT euros FROM ledger WHERE number = ?", (number,)).fetchall() == [(sold,)]
                assert kd.info(f"order_{number}").status == "completed"
            assert rows(shop, "stock") == [("lamp", 0), ("rug", 1)]
            assert kd.store.verify().holds
        shop.close()


def rows(shop: sqlite3.Connection, table: str) -> list[tuple[object, ...]]:
    return shop.execute(f"SELECT * FROM {table}").fetchall()


def work(store: str) -> None:
    with killick.open(store) as kd:
        while due := kd.advance_due():
            for run in due:
                print(f"  {run.run}: {run.result}")


if __name__ == "__main__":
    work(sys.argv[2]) if sys.argv[1:2] == ["work"] else main()
