"""Finds the cheapest way through a sequence of places, within limits of memory. It knows whole numbers alone.

Each place is passed in one of its ways. Ways through the places so far lead to a state of four numbers:

    stays     Σ way.stays, the bytes that they leave behind
    leaving   the bytes that the last moving way has moved: they go once the next moving way has been taken
    moved     Σ way.moved, which a limit may bound at the end
    cost      Σ way.cost

A way can be taken in a state if stays + leaving is at most its room. The search is dynamic programming (Nemhauser and
Ullmann, Management Science 15(9), 1969):

1. Walk the places in order, with every state that some ways so far lead to.
2. Leave out the states that cannot become cheap enough. The rest costs at least as much as if nothing were ever leaving
   and moved bytes had no bound. Then only ``stays`` matters, and a walk from the last place to the first finds that
   cost for every ``stays``.
3. Leave out each state that another one with equal ``leaving`` and ``moved`` is no worse than.
4. After the last place, the state with the least cost is the answer.

The search begins with the least cost that step 2 thinks possible as the most that is let pass, and raises it until it
finds an answer. Nothing cheaper was left out then, so the answer is exact.

If moved bytes have a bound, step 2 lets each cost a price, and counts the price of the whole bound as paid back. That
is no dearer than the truth, whatever the price is. The price chosen makes it nearly as dear as possible (Everett,
Operations Research 11(3), 1963). There may be very many states then, so the search gives up at some number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

_MUCH = 1 << 61
_UNITS = 1 << 10  # of a cost, where a byte has a price: so many prices there are between 0 and 1
_SHARE = 1 << 11  # the first raise of the cost that is let pass is the least cost divided by this
_MOST_STATES = 2_000  # after a place, where moved bytes have a bound
_LAST_HALVINGS = 5  # of the interval of prices


class Way(NamedTuple):
    """A way to pass a place."""

    choice: int
    """What to call it."""
    cost: int
    stays: int
    """The bytes that it leaves behind for good."""
    moved: int
    """The bytes that it leaves behind until the next way that moves some has been taken."""
    room: int
    """The most bytes that may be there before."""


Places = Sequence[Sequence[Way]]


class _TooManyStatesError(Exception):
    """The search would take too long."""


class _ToGo(NamedTuple):
    """The least cost of the rest of the places, by the bytes that stay before it. All rise together."""

    limits: Numbers
    """The most bytes that may stay."""
    costs: Numbers
    """The least cost then, with the price of moved bytes."""
    moved: Numbers

    def at(self, stays: Numbers) -> Numbers:
        """For each of these numbers of bytes, the least cost."""
        return np.append(self.costs, _MUCH)[np.searchsorted(self.limits, stays)]


def cheapest(places: Places, most: int | None = None, most_moved: int | None = None) -> tuple[int, ...] | None:
    """The choices of the cheapest ways through all places; None if there are none.

    most: the highest cost to look for.
    most_moved: of all places together. If it is given, None may also mean that there are too many states to look on.
    """
    units, price = 1, 0
    if most_moved is not None:
        units, price = _UNITS, _price(places, most_moved)
        places = [[way._replace(cost=units * way.cost) for way in ways] for ways in places]
    to_go = _to_go(places, price)
    least = int(to_go[0].at(np.zeros(1, np.int64))[0]) - price * (most_moved or 0)
    dearest = sum(max(way.cost for way in ways) for ways in places if ways)
    if most is not None:
        dearest = min(dearest, units * most)
    more = 0
    while least <= dearest:
        limit = min(least + more, dearest)
        try:
            found = _walk(places, to_go, limit, price, most_moved)
        except _TooManyStatesError:
            return None
        if found is not None or limit == dearest:
            return found
        more = max(2 * more, abs(least) // _SHARE, 1)
    return None


def _price(places: Places, most_moved: int) -> int:
    """About the least price of a moved byte at which the cheapest ways move no more, if nothing is ever leaving."""
    places = [[way._replace(cost=_UNITS * way.cost) for way in ways] for ways in places]
    dearest = _MUCH // 4 // max(sum(max((way.moved for way in ways), default=0) for ways in places), most_moved, 1)

    def is_enough(price: int) -> bool:
        first = _to_go(places, price)[0]
        at = int(np.searchsorted(first.limits, 0))
        return at == len(first.moved) or int(first.moved[at]) <= most_moved

    low, high = 0, 1
    while 2 * high < dearest and not is_enough(high):
        low, high = high, 2 * high
    for _ in range(_LAST_HALVINGS):
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _to_go(places: Places, price: int) -> list[_ToGo]:
    """The rest before each place, and, last, after all of them."""
    nothing = np.zeros(1, np.int64)
    found = [_ToGo(np.full(1, _MUCH), nothing, nothing)]
    for ways in reversed(places):
        limits, costs, moved = found[-1]
        if not ways or not len(limits):
            found.append(_ToGo(*[np.zeros(0, np.int64)] * 3))
            continue
        all_limits = np.concatenate([np.minimum(way.room, limits - way.stays) for way in ways])
        all_costs = np.concatenate([costs + (way.cost + price * way.moved) for way in ways])
        all_moved = np.concatenate([moved + way.moved for way in ways])
        order = np.lexsort((-all_limits, all_costs))
        order = order[all_limits[order] >= 0]
        highest = np.maximum.accumulate(all_limits[order])
        order = order[np.concatenate([[True], highest[1:] > highest[:-1]])[: len(order)]]
        found.append(_ToGo(all_limits[order], all_costs[order], all_moved[order]))
    return found[::-1]


def _walk(
    places: Places, to_go: Sequence[_ToGo], limit: int, price: int, most_moved: int | None
) -> tuple[int, ...] | None:
    """The choices of the cheapest ways, if these cost at most ``limit``."""
    refund = price * (most_moved or 0)
    stays = leaving = moved = cost = np.zeros(1, np.int64)
    # For each place and each state after it: the index of the state before it, and the choice that leads there.
    steps: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
    for ways, rest in zip(places, to_go[1:], strict=True):
        alive, reached = stays + leaving, []
        for way in ways:
            before = np.flatnonzero(alive <= way.room)
            after = [
                stays[before] + way.stays,
                np.full(len(before), way.moved) if way.moved else leaving[before],
                moved[before] + (0 if most_moved is None else way.moved),
                cost[before] + way.cost,
            ]
            cheap = after[3] + price * after[2] + rest.at(after[0]) <= limit + refund
            if most_moved is not None:
                cheap &= (after[2] <= most_moved) & (after[3] <= limit)
            reached.append([numbers[cheap] for numbers in (*after, before, np.full(len(before), way.choice))])
        if not any(len(numbers) for numbers, *_ in reached):
            return None
        stays, leaving, moved, cost, before, choices = map(np.concatenate, zip(*reached, strict=True))
        kept = _undominated(stays, leaving, moved, cost)
        if most_moved is not None and len(kept) > _MOST_STATES:
            raise _TooManyStatesError
        stays, leaving, moved, cost = stays[kept], leaving[kept], moved[kept], cost[kept]
        steps.append((before[kept], choices[kept]))
    at = int(np.argmin(cost))
    found = []
    for before, choices in reversed(steps):
        found.append(int(choices[at]))
        at = int(before[at])
    return tuple(reversed(found))


def _undominated(stays: Numbers, leaving: Numbers, moved: Numbers, cost: Numbers) -> NDArray[np.intp]:
    """The indices of states that no other one with equal ``leaving`` and ``moved`` matches. Of equal ones the first."""
    order = np.lexsort((cost, stays, moved, leaving))  # which is stable
    first = (np.diff(leaving[order]) != 0) | (np.diff(moved[order]) != 0)
    group = np.concatenate([[0], np.cumsum(first)])
    rank = np.unique(cost[order], return_inverse=True)[1].reshape(-1) - group * (len(order) + 1)
    best = np.minimum.accumulate(rank)  # starts anew with each group, whose ranks are below all those before it
    return order[np.concatenate([[True], rank[1:] < best[:-1]])]
