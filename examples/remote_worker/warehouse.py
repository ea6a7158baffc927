"""A warehouse that agents reserve stock in: a Temporal worker that knows nothing of Muster.

`python -m warehouse [--address HOST:PORT] [--queue warehouse] [--data warehouse.db]`, in this
directory. It needs the package `temporalio`, and any language with an SDK of Temporal's could
take its place. `--packing-s` is how long one order takes to pack.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sqlite3
from contextlib import closing
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

STOCK = {"apples": 12, "pears": 7, "plums": 40}

HEARTBEAT_S = 0.5
"""Well under the `heartbeat` that the agent's file gives."""

TABLES = """
create table if not exists stock (item text primary key, amount integer not null);
create table if not exists reservation (
    key text primary key, item text not null, amount integer not null, asked integer not null
);
"""


class Warehouse:
    """The stock, and what is reserved of it, in one SQLite file."""

    def __init__(self, path: str, packing_s: float) -> None:
        self._path = path
        self._packing_s = packing_s
        with closing(self._open()) as database, database:
            database.executescript(TABLES)
            database.executemany("insert or ignore into stock values (?, ?)", STOCK.items())

    @activity.defn(name="reserve_stock")
    async def reserve_stock(self, order: dict[str, Any]) -> dict[str, Any]:
        """Reserve an amount of an item: once for one call, however often the call is made.

        The activity's id is the call's id, the same when it is tried again.
        """
        key = activity.info().activity_id
        left = self._reserve(key, str(order["item"]), int(order["amount"]))
        try:
            await self._pack()
        except asyncio.CancelledError:
            self._give_back(key)
            raise
        return {"item": order["item"], "reserved": order["amount"], "left": left}

    def _reserve(self, key: str, item: str, amount: int) -> int:
        """Take the amount out of the stock, unless this key has; return what is left."""
        with closing(self._open()) as database, database:
            database.execute("begin immediate")
            found = database.execute("select amount from stock where item = ?", (item,)).fetchone()
            if found is None:
                raise ApplicationError(f"we have no {item}", non_retryable=True)
            again = "update reservation set asked = asked + 1 where key = ?"
            if database.execute(again, (key,)).rowcount:
                return int(found[0])
            if amount > found[0]:
                raise ApplicationError(f"only {found[0]} {item} are left", non_retryable=True)
            database.execute("insert into reservation values (?, ?, ?, 1)", (key, item, amount))
            database.execute("update stock set amount = amount - ? where item = ?", (amount, item))
            return int(found[0]) - amount

    def _give_back(self, key: str) -> None:
        """Undo a reservation whose order was cancelled."""
        with closing(self._open()) as database, database:
            database.execute("begin immediate")
            taken = "delete from reservation where key = ? returning item, amount"
            for item, amount in database.execute(taken, (key,)).fetchall():
                more = "update stock set amount = amount + ? where item = ?"
                database.execute(more, (amount, item))

    async def _pack(self) -> None:
        """Take the time it takes; heartbeats bring a cancellation, and tell that we live."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._packing_s
        while (rest := until - loop.time()) > 0:
            activity.heartbeat()
            await asyncio.sleep(min(HEARTBEAT_S, rest))

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=10.0)


async def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description="Serve a warehouse's task queue.")
    parser.add_argument("--address", default="127.0.0.1:7233", help="of Temporal")
    parser.add_argument("--queue", default="warehouse")
    parser.add_argument("--data", default="warehouse.db", help="the file with the stock")
    parser.add_argument("--packing-s", type=float, default=0.2)
    given = parser.parse_args()
    warehouse = Warehouse(given.data, given.packing_s)
    client = await Client.connect(given.address)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Worker(client, task_queue=given.queue, activities=[warehouse.reserve_stock]):
        print(f"warehouse polls {given.queue!r}", flush=True)
        await stop.wait()


def run() -> None:
    """Run as a program."""
    asyncio.run(main())


if __name__ == "__main__":
    run()
