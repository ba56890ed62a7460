"""Stages from functions: those that autograd differentiates, and those with an effect alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ds_moe_ext.schedule.crew import SavesAlike, Uncut
from ds_moe_ext.schedule.task import Span

Function = Callable[..., tuple[Any, ...]]  # (*reads) -> what the task writes


@dataclass(frozen=True, eq=False)
class Graph:
    """The graph of a function, apart from the tensors that its backward needs.

    Those are saved beside it, in the place where the whole program saves its tensors: hooks that
    checkpoint or offload activations see them there, once for all stages.

    Attributes:
        outputs: edges of what it wrote; None where nothing has a gradient.
        inputs: edges of what it read.
        kept: the tensors, while backward runs.
    """

    outputs: tuple[GradientEdge | None, ...]
    inputs: tuple[Any, ...]
    kept: list[Tensor]


def run_apart(function: Function, reads: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Run a function under autograd, cut off from the graph around it.

    Returns:
        What it wrote, detached; and what ``gradients`` takes: the graph, then the tensors that its
        backward needs. Nothing if nothing has a gradient.

    Raises:
        RuntimeError: the function changed in place what its backward needs.
    """
    leaves = [_leaf(read) for read in reads]
    if not any(leaf.requires_grad for leaf in _flat(leaves)):
        return function(*leaves), ()
    kept: list[Tensor] = []
    versions: list[int] = []

    def keep(tensor: Tensor) -> int:
        kept.append(tensor.detach())
        versions.append(tensor._version)
        return len(kept) - 1

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda index: kept[index]):
        written = function(*leaves)
    if [tensor._version for tensor in kept] != versions:
        raise RuntimeError(
            "an expert or gate changed in place a tensor that its backward needs; compute the new "
            "values into a tensor of their own"
        )
    outputs = tuple(_edge(x) if isinstance(x, Tensor) else None for x in written)
    inputs = tuple(
        tuple(map(_edge, leaf)) if isinstance(leaf, tuple) else _edge(leaf)
        for leaf in leaves
        if isinstance(leaf, (tuple, Tensor)) and _is_differentiable(leaf)
    )
    plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in written)
    tensors = tuple(kept)
    kept.clear()
    return plain, (Graph(outputs, inputs, kept), *tensors)


def gradients(
    saved: Sequence[Any], grads: Sequence[Any], graded: Sequence[bool]
) -> tuple[Any, ...]:
    """Gradients of the differentiable reads of ``run_apart``, in order; frees the graph.

    Args:
        saved: what ``run_apart`` gave.
        grads: of the writes that have a gradient.
        graded: for each write, whether it has one.
    """
    if not saved:
        return ()
    graph, *tensors = saved
    graph.kept.extend(tensors)
    outputs = [edge for edge, has_gradient in zip(graph.outputs, graded) if has_gradient]
    pairs = [(e, g) for e, g in zip(outputs, grads) if e is not None and g is not None]
    wanted = [e for e in _flat(graph.inputs) if e is not None]
    found = iter(
        torch.autograd.grad([e for e, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    )
    graph.kept.clear()
    return tuple(
        tuple(None if e is None else next(found) for e in edge)
        if _is_tuple_of_edges(edge)
        else (None if edge is None else next(found))
        for edge in graph.inputs
    )


@dataclass(frozen=True)
class Local(Uncut):
    """A stage from a function.

    Attributes:
        function: called with what the task reads.
        graded: for each write, whether it has a gradient.
    """

    function: Function
    graded: tuple[bool, ...] = (True,)

    def forward(self, span: Span, *reads: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return run_apart(self.function, reads)

    def backward(self, span: Span, saved: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
        return gradients(saved, grads, self.graded)


@dataclass(frozen=True, eq=False)
class Aside(SavesAlike):
    """A stage that only has an effect: what the task reads says when, not what.

    Attributes:
        act: called with the task's span.
    """

    act: Callable[[Span], None]

    def forward(self, span: Span, *reads: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        self.act(span)
        return (None,), ()

    def backward(self, span: Span, saved: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
        return ()


def _is_differentiable(leaf: Any) -> bool:
    parts = leaf if isinstance(leaf, tuple) else (leaf,)
    return all(isinstance(part, Tensor) and part.is_floating_point() for part in parts)


def _is_tuple_of_edges(edge: Any) -> bool:
    return isinstance(edge, tuple) and not isinstance(edge, GradientEdge)


def _leaf(read: Any) -> Any:
    if isinstance(read, tuple):
        return tuple(_leaf(part) for part in read)
    if isinstance(read, Tensor) and read.is_floating_point():
        return read.detach().requires_grad_(read.requires_grad)
    return read


def _edge(tensor: Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _flat(parts: Any) -> list[Any]:
    flat: list[Any] = []
    for part in parts:
        if _is_tuple_of_edges(part):
            flat += _flat(part)
        elif isinstance(part, (Tensor, GradientEdge)) or part is None:
            flat.append(part)
    return flat
