# SPDX-License-Identifier: Apache-2.0
"""A graph of autograd in parts: backward through one part now, through what came before it later.

HeterMoE cuts the graph at each layer's attention outputs (section 4.1; spec 2.5, rules 19 to 21).
Autograd numbers its nodes as they are made, thread by thread, so that "what came before" is known
without help from the model: nodes with lower numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


def _probe() -> Node:
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).view(()).grad_fn
    assert node is not None
    return node


_AccumulateGrad: Any = type(_probe().next_functions[0][0])  # torch gives it no name

Root = tuple[GradientEdge, Tensor]
"""An output of a node and its gradient."""


@dataclass(frozen=True, eq=False)
class Part:
    """The nodes that some outputs are made by, up to where the part began."""

    # Where gradients are accumulated: parameters, and where the graph was cut by detaching.
    leaves: tuple[GradientEdge, ...]
    before: tuple[GradientEdge, ...]  # outputs of earlier nodes that the part read

    @classmethod
    def behind(cls, outputs: Iterable[GradientEdge], first: int) -> Part:
        """What is behind outputs of nodes of the part, whose first node has this number."""
        waiting = [edge.node for edge in outputs]
        seen = set(waiting)
        leaves: dict[Node, GradientEdge] = {}
        before: dict[tuple[Node, int], GradientEdge] = {}
        while waiting:
            for node, number in waiting.pop().next_functions:
                if node is None or node in seen:
                    continue
                if isinstance(node, _AccumulateGrad):
                    leaves[node] = GradientEdge(node, number)
                elif node._sequence_nr() < first:
                    before[node, number] = GradientEdge(node, number)
                else:
                    seen.add(node)
                    waiting.append(node)
        return cls(tuple(leaves.values()), tuple(before.values()))

    @property
    def is_entangled(self) -> bool:
        """Whether an earlier node that the part read leads to another one, or to a leaf of it."""
        waiting = list({edge.node for edge in self.before})
        wanted = {edge.node for edge in (*self.leaves, *self.before)}
        seen: set[Node] = set()
        while waiting:
            for node, _ in waiting.pop().next_functions:
                if node in wanted:
                    return True
                if node is not None and node not in seen:
                    seen.add(node)
                    waiting.append(node)
        return False


@dataclass(eq=False)
class Pending:
    """Gradients of outputs that later parts read, until the turn of the part that made them."""

    _grads: dict[tuple[Node, int], Root] = field(default_factory=dict)

    def add(self, edge: GradientEdge, grad: Tensor) -> None:
        """One more."""
        key = (edge.node, edge.output_nr)
        _, before = self._grads.get(key, (edge, None))
        self._grads[key] = (edge, grad if before is None else before + grad)

    def take(self, first: int) -> list[Root]:
        """Those of nodes numbered ``first`` and up; they are forgotten."""
        keys = [key for key in self._grads if key[0]._sequence_nr() >= first]
        return [self._grads.pop(key) for key in keys]


def backward_of_part(
    roots: Sequence[Root], first: int, pending: Pending
) -> list[tuple[Tensor, Tensor]]:
    """Backward through one part, whose nodes are freed."""
    found: list[tuple[Tensor, Tensor]] = []
    own: list[Root] = []
    for edge, grad in (*roots, *pending.take(first)):
        if isinstance(edge.node, _AccumulateGrad):
            found.append((edge.node.variable, grad))
        elif edge.node._sequence_nr() < first:
            pending.add(edge, grad)
        else:
            own.append((edge, grad))
    part = Part.behind([edge for edge, _ in own], first)
    for edge, grad in _left_by(own, part):
        if isinstance(edge.node, _AccumulateGrad):
            found.append((edge.node.variable, grad))
        else:
            pending.add(edge, grad)
    return found


def _left_by(own: Sequence[Root], part: Part) -> list[Root]:
    """What the part leaves to others."""
    wanted = [*part.leaves, *part.before]
    if not wanted:
        return []
    is_entangled = part.is_entangled
    leaves: list[Any] = [edge.node for edge in part.leaves]
    earlier = {edge.node for edge in part.before} if is_entangled else ()
    with _without_hooks(leaf.variable for leaf in leaves), _closed(earlier):
        grads = torch.autograd.grad(
            [edge for edge, _ in own],
            wanted,
            [grad for _, grad in own],
            retain_graph=is_entangled,
            allow_unused=True,
        )
    return [(edge, grad) for edge, grad in zip(wanted, grads) if grad is not None]


@contextmanager
def _closed(nodes: Iterable[Node]) -> Iterator[None]:
    """No gradient passes through these nodes, inside the block: autograd would go through one to
    reach another. It runs them, with nothing, so that they must be retained."""
    handles = [node.register_prehook(lambda grads: (None,) * len(grads)) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Hooks of tensors do not run inside the block: they see what is handed over in the end."""
    hooks = [(own, dict(own)) for leaf in leaves if (own := leaf._backward_hooks)]
    for own, _ in hooks:
        own.clear()
    try:
        yield
    finally:
        for own, kept in hooks:
            own.update(kept)


def next_number() -> int:
    """Number of the node that the calling thread will make next, or lower than that and higher than
    all before."""
    return int(_probe()._sequence_nr())
