# SPDX-License-Identifier: Apache-2.0
"""Stages from functions: those that autograd differentiates, those with an effect alone; and one
that stands for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ds_moe_ext.schedule.crew import SavesAlike, Stage, Uncut
from ds_moe_ext.schedule.task import Span

Function = Callable[..., tuple[Any, ...]]  # (*reads) -> what the task writes


@dataclass(frozen=True, eq=False, slots=True)
class Graph:
    """The graph of a function, apart from the tensors that its backward needs.

    Those are saved beside it, in the place where the whole program saves its tensors: hooks that
    checkpoint or offload activations see them there, once for all stages.

    Attributes:
        outputs: edges of what it wrote; None where nothing has a gradient.
        inputs: what it read that has a gradient, in a row; autograd holds them anyway.
        reads: for each read that can be differentiated, how many gradients it gets: of a tensor
            None, of a tuple one a part; and for each of them whether it has an edge.
        kept: the tensors, while backward runs.
    """

    outputs: tuple[GradientEdge | None, ...]
    inputs: tuple[Tensor, ...]
    reads: tuple[bool | tuple[bool, ...], ...]
    kept: list[Tensor]


def run_apart(function: Function, reads: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Run a function under autograd, cut off from the graph around it.

    Returns:
        What it wrote, detached; and what ``gradients`` takes: the graph, then the tensors that its
        backward needs. Nothing if nothing has a gradient.

    Raises:
        RuntimeError: the function changed in place what its backward needs.
    """
    leaves = tuple(map(_leaf, reads))
    flat = [part for leaf in leaves for part in (leaf if isinstance(leaf, tuple) else (leaf,))]
    graded = [part for part in flat if isinstance(part, Tensor) and part.requires_grad]
    if not graded:
        return function(*leaves), ()
    kept: list[Tensor] = []
    versions: list[int] = []

    def keep(tensor: Tensor) -> int:
        kept.append(tensor.detach())
        versions.append(tensor._version)
        return len(kept) - 1

    with torch.enable_grad(), saved_tensors_hooks(keep, kept.__getitem__):
        written = function(*leaves)
    if [tensor._version for tensor in kept] != versions:
        raise RuntimeError(
            "an expert or gate changed in place a tensor that its backward needs; compute the new "
            "values into a tensor of their own"
        )
    graph = Graph(
        outputs=tuple(_edge(x) if isinstance(x, Tensor) else None for x in written),
        inputs=tuple(graded),
        reads=tuple(wanted for leaf in leaves if (wanted := _wanted(leaf)) is not None),
        kept=kept,
    )
    plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in written)
    tensors = tuple(kept)
    kept.clear()
    return plain, (graph, *tensors)


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
    found = iter(
        torch.autograd.grad(
            [e for e, _ in pairs], graph.inputs, [g for _, g in pairs], allow_unused=True
        )
    )
    graph.kept.clear()
    return tuple(
        tuple(next(found) if part else None for part in wanted)
        if isinstance(wanted, tuple)
        else (next(found) if wanted else None)
        for wanted in graph.reads
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


@dataclass(eq=False)
class Present:
    """A stage in whose place another one comes between steps, in programs that stay.

    Attributes:
        stage: the present one.
    """

    stage: Stage

    def forward(self, span: Span, *reads: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return self.stage.forward(span, *reads)

    def backward(self, span: Span, saved: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
        return self.stage.backward(span, saved, *grads)

    def recut(self, span: Span, pieces: Sequence[tuple[Span, tuple[Any, ...]]]) -> tuple[Any, ...]:
        return self.stage.recut(span, pieces)


def _leaf(read: Any) -> Any:
    if isinstance(read, tuple):
        return tuple(map(_leaf, read))
    if isinstance(read, Tensor) and read.is_floating_point():
        leaf = read.detach()
        return leaf.requires_grad_() if read.requires_grad else leaf
    return read


def _wanted(leaf: Any) -> bool | tuple[bool, ...] | None:
    """Which gradients there are of a read; None where it cannot be differentiated."""
    if isinstance(leaf, tuple):
        is_float = all(isinstance(part, Tensor) and part.is_floating_point() for part in leaf)
        return tuple(part.requires_grad for part in leaf) if is_float else None
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.requires_grad
    return None


def _edge(tensor: Tensor) -> GradientEdge | None:
    if tensor.grad_fn is not None:
        return GradientEdge(tensor.grad_fn, tensor.output_nr)
    return get_gradient_edge(tensor) if tensor.requires_grad else None
