"""A graph of autograd in parts: backward through one part now, through what came before it later.

HeterMoE cuts the graph at each layer's attention outputs (section 4.1; spec 2.5, rules 19 to 21).
Autograd numbers its nodes as they are made, thread by thread, so that "what came before" is known
without help from the model: nodes with lower numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """The nodes that some outputs are made by, up to where the part began.

    Attributes:
        leaves: where gradients are accumulated: parameters, and where the graph was cut by
            detaching.
        before: outputs of earlier nodes that the part read.
    """

    leaves: tuple[GradientEdge, ...]
    before: tuple[GradientEdge, ...]

    @classmethod
    def behind(cls, outputs: Iterable[GradientEdge], first: int) -> Part:
        """What is behind outputs of the part.

        Args:
            outputs: of nodes of the part.
            first: number of the part's first node.
        """
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
    """Backward through one part, whose nodes are freed.

    Args:
        roots: of the part, with the gradients that came from outside.
        first: number of its first node.
        pending: in and out: what later parts left for this one, and this for earlier ones.

    Returns:
        Its leaves that have a gradient, with that.
    """
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
    work = _node_by_node if part.is_entangled else _at_once
    for edge, grad in work(own, part, first):
        if isinstance(edge.node, _AccumulateGrad):
            found.append((edge.node.variable, grad))
        else:
            pending.add(edge, grad)
    return found


def _at_once(own: Sequence[Root], part: Part, first: int) -> list[Root]:
    """What the part leaves to others, by autograd."""
    wanted = [*part.leaves, *part.before]
    if not wanted:
        return []
    leaves: list[Any] = [edge.node for edge in part.leaves]
    with _without_hooks(leaf.variable for leaf in leaves):
        grads = torch.autograd.grad(
            [edge for edge, _ in own], wanted, [grad for _, grad in own], allow_unused=True
        )
    return [(edge, grad) for edge, grad in zip(wanted, grads) if grad is not None]


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


def _node_by_node(own: Sequence[Root], part: Part, first: int) -> list[Root]:
    """The same without autograd's engine, which would go through one earlier node to another.

    Nodes are called in the opposite order of their numbers. That takes longer.
    """
    left: list[Root] = []

    def work() -> None:
        grads: dict[Node, list[Tensor | None]] = {}
        waiting: list[tuple[int, int, Node]] = []

        def add(node: Node, number: int, grad: Tensor) -> None:
            grad = _fitted(grad, node._input_metadata[number])
            if isinstance(node, _AccumulateGrad) or node._sequence_nr() < first:
                left.append((GradientEdge(node, number), grad))
                return
            if node not in grads:
                grads[node] = [None] * len(node._input_metadata)
                heapq.heappush(waiting, (-node._sequence_nr(), id(node), node))
            before = grads[node][number]
            grads[node][number] = grad if before is None else before + grad

        for edge, grad in own:
            add(edge.node, edge.output_nr, grad)
        while waiting:
            node: Any = heapq.heappop(waiting)[-1]
            given = grads.pop(node)
            is_ours = isinstance(node, torch.autograd.function.BackwardCFunction)
            found = node.apply(*given) if is_ours else node(*given)
            found = found if isinstance(found, tuple) else (found,)
            for (behind, number), grad in zip(node.next_functions, found):
                if behind is not None and grad is not None:
                    add(behind, number, grad)

    begin = torch.zeros((), requires_grad=True)
    _Inside.apply(begin, work).backward()
    return left


def _fitted(grad: Tensor, of: Any) -> Tensor:
    """As its node takes it: what was broadcast is summed."""
    if grad.shape != of.shape:
        grad = grad.sum_to_size(of.shape)
    return grad.to(of.dtype)


class _Inside(torch.autograd.Function):
    """Does some work inside of a backward, as what it calls expects."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, work: Callable[[], None]) -> Tensor:
        ctx.work = work
        return begin.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.work()
        return None, None


def next_number() -> int:
    """Number of the node that the calling thread will make next, or lower than that and higher than
    all before."""
    return int(_probe()._sequence_nr())
