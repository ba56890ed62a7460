# SPDX-License-Identifier: Apache-2.0
"""Where a pass meets its copies, by the tasks of ``schedule/wires.py``::

    start       of a block, before     forward: begin the flight
                the host computes      backward: wait for what came home, add it to the home's own
    join        in the program,        forward: wait for the gather
                before the experts     backward: have the gradients of the copies ready
    have_again  in backward, before    wait for copies that were freed
                the experts

Start is an autograd node of its own. Autograd runs backward in reverse order of creation, so that
all that was computed between start and join, above all attention, has its backward between the two
moments of the reduction (HECATE, spec rules 34 and 35; Pro-Prophet, spec 3.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ds_moe_ext.moe.copies.flight import Flight
from ds_moe_ext.moe.copies.layer_copies import Copies
from ds_moe_ext.moe.copies.slab import Weights
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.schedule.crew import SavesAlike
from ds_moe_ext.schedule.task import Span


def started(copies: Copies, flight: Flight, weights: Weights) -> Weights:
    """The weights of the experts at home as the program wants them.

    Args:
        copies: of the layer.
        flight: of the pass.
        weights: of the experts at home on this rank, by slot or stacked.

    Returns:
        They, and a ticket: an empty tensor that makes every rank take part in backward.
    """
    ticket = copies.nothing.detach().requires_grad_(copies.is_trained)
    started: Weights = _Start.apply(copies, flight, ticket, *weights)
    return started


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, copies: Copies, flight: Flight, ticket: Tensor, *weights: Tensor
    ) -> Weights:
        ctx.copies, ctx.flight = copies, flight
        flight.start = ref(ctx)  # the node itself
        return tuple([weight.detach() for weight in (*weights, ticket)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.copies.come_home(ctx.flight, grads[:-1])


@dataclass(frozen=True, eq=False)
class Join(SavesAlike):
    """Reads the weights at home and the route; writes the weights of all that compute here."""

    copies: Copies

    def forward(
        self, span: Span, weights: Weights, layer_route: LayerRoute
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        flight = self.copies.taken()
        return (flight.weights(layer_route.target),), (flight,)

    def backward(self, span: Span, saved: tuple[Any, ...], grads: Weights) -> tuple[Any, ...]:
        return (self.copies.collect(saved[0], grads),)


@dataclass(frozen=True, eq=False)
class HaveAgain(SavesAlike):
    """In backward, by what ``Join`` saved of the pass; in forward nothing was freed yet."""

    copies: Copies

    def forward(self, span: Span, *reads: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (None,), ()

    def backward(self, span: Span, saved: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
        self.copies.have_again(saved[0])
        return ()
