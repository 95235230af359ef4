"""Bodies of tools that are wrong. Not in a test module, whose assertions pytest would rewrite into calls."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any


@dataclasses.dataclass
class Order:
    """What is bought."""

    item: str
    amount: int


@dataclasses.dataclass
class Gift(Order):
    """An order with a card."""

    card: str = ""


class Sender:
    """The far side."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, what: Any) -> None:
        self.sent.append(what)


FAR = Sender()


def misspelt(order: Order) -> Any:
    return order.amuont  # type: ignore[attr-defined]


def deeper(order: Order) -> Any:
    assert order is not None, "an order is needed"
    return misspelt(
        order,
    )


def sends(order: Order) -> None:
    FAR.send(order)
    assert order.amount > 100, "too small"


async def name_error(order: Order) -> None:
    FAR.send(ordre)  # type: ignore[name-defined]  # noqa: F821


def in_a_thread(order: Order) -> None:
    total = f"{order.item}: {order.amuont}"  # type: ignore[attr-defined]
    FAR.send(total)


async def in_helpers(order: Order) -> None:
    what = {"order": deeper(order)}
    FAR.send(what)
    await asyncio.sleep(0)


async def no_key(order: Order) -> None:
    FAR.send({"tea": 3}["coffee"])


async def asserts(order: Order) -> None:
    if order.item == "milk":
        raise ValueError("no milk")
    assert order.amount > 100, f"{order.amount} is too small"
    FAR.send(order)


async def after_a_call(order: Order) -> None:
    FAR.send(order)
    misspelt(order)


async def in_a_loop(order: Order) -> None:
    step = 0
    while step < 2:
        step = {0: 1}[step]
        FAR.send(step)


async def by_a_function_of_c(order: Order) -> None:
    sorted([order, order], key=sends)  # type: ignore[type-var, arg-type]


async def in_a_helper_that_sends(order: Order) -> None:
    sends(order)


async def of_c_itself(order: Order) -> None:
    FAR.sent.append(1, 2)  # type: ignore[call-arg]


async def caught(order: Order) -> None:
    try:
        raise ValueError(FAR.send(order))
    except ValueError:
        order.amuont += 1  # type: ignore[attr-defined]


async def raised_again(order: Order) -> None:
    try:
        misspelt(order)
    except AttributeError:
        FAR.send(order)
        raise


async def in_the_end(order: Order) -> None:
    try:
        misspelt(order)
    finally:
        FAR.send(order)


def of_a_helper_that_ends(order: Order) -> None:
    try:
        misspelt(order)
    finally:
        FAR.send(order)


async def in_the_end_of_a_helper(order: Order) -> None:
    of_a_helper_that_ends(order)


async def after_an_await(order: Order) -> None:
    await asyncio.sleep(0)
    misspelt(order)


async def of_an_attribute(order: Order) -> None:
    FAR.last = order  # type: ignore[attr-defined]
    misspelt(order)


async def raised_on_purpose(order: Order) -> None:
    raise TypeError("the bank says so")
