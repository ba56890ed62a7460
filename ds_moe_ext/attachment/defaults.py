# SPDX-License-Identifier: Apache-2.0
"""Defaults that a host cannot have: they are settled at start, and a line says what was left out.

A key that is null asks for what its strategy does where the host can. What is refused of a value
that a person wrote is left out of one that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ds_moe_ext.attachment.refusal import Refusal, refuse
from ds_moe_ext.strategy import Keys, Strategy

Tell = Callable[[str], object]
"""Takes a line for a person."""


@dataclass(frozen=True)
class Default:
    """Something that a strategy does where its host can, unless a key says otherwise.

    Attributes:
        key: which one, of a strategy's.
        is_on: whether a strategy does it.
        without: the strategy without it; the same where the key asks for it.
        value: that the key has, where it asks for it.
        left_out: how a line says that it is not done.
        off: what a person sets the key to, to have it left out.
    """

    key: Callable[[Keys], str]
    is_on: Callable[[Strategy], bool]
    without: Callable[[Strategy], Strategy]
    value: Callable[[Strategy], str]
    left_out: str
    off: str


HOMES = Default(
    key=lambda keys: keys.homes,
    is_on=lambda strategy: strategy.rhythm().shard_every > 0,
    without=lambda strategy: strategy.with_homes_that_stay(),
    value=lambda strategy: str(strategy.rhythm().shard_every),
    left_out="experts keep their homes",
    off="0 or null",
)
SLICES = Default(
    key=lambda keys: keys.slices_gradients,
    is_on=lambda strategy: strategy.slices_gradients,
    without=lambda strategy: strategy.with_gradients_left(),
    value=lambda strategy: "true",
    left_out="dense gradients are not reduced in slices",
    off="false or null",
)


def settle(
    default: Default, strategy: Strategy, refusals: Iterable[Refusal], given: Any, tell: Tell
) -> Strategy:
    """The strategy as it can be had. Pure but for telling.

    Args:
        default: what it may do.
        strategy: that was chosen.
        refusals: why it could not do that, the first of them first.
        given: as their ``asked`` takes it.
        tell: is given the line that says what was left out, and why.

    Raises:
        ValueError: a key asks for what cannot be done.
    """
    rows = tuple(refusals)
    found = ((row, asked) for row in rows if (asked := row.asked(given)))
    if not default.is_on(strategy) or (first := next(found, None)) is None:
        return strategy
    key, settled = default.key(strategy.keys), default.without(strategy)
    if default.is_on(settled):
        context = f"{key} is {default.value(strategy)}"
        refuse(rows, given, context=context, or_else=f"set {key} to {default.off}")
    row, asked = first
    tell(f"{key} is null: {default.left_out}, because {asked}: {row.reason}; {row.remedy}")
    return settled
