# SPDX-License-Identifier: Apache-2.0
"""One piece of a stripe on its way through the user's model, stage by stage, there and back.

The model runs unchanged in a coroutine, which pauses at the experts of every layer. A *block* is
the module that a layer with experts stands in: the graph of autograd is cut where blocks begin and
end, and at what the experts return. So the backward of a stage has three parts::

    forward    ... | block: attention, norm, gate  <experts>  weighted sum, residual | ...
    backward       first what lies between two blocks, then from the block's end to the experts'
                   outputs alone, whose gradients travel; when those of the experts' inputs have
                   come back, the whole block: both branches are summed there, once.

This is HeterMoE's accumulation (section 4.1; spec rules 20, 21) with the cut at the blocks' borders
instead of attention's outputs: what leads from the block's end to the experts' outputs, a sum, is
gone through twice, and attention once. Shape letters: T tokens, K choices, N rows sent, D model
width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map

from ds_moe_ext.hosts.zebra.coroutine import Ask, Coroutine, RandomNumbers, Returned
from ds_moe_ext.hosts.zebra.graph_cut import Pending, Root, backward_of_part, next_number
from ds_moe_ext.moe.route import Route, weighing_grads
from ds_moe_ext.schedule.program import in_backward


class Question(NamedTuple):
    """What a piece wants of the experts.

    Attributes:
        layer: number of the layer.
        x_TD: hidden states, detached.
        expert_TK: chosen experts, int64; -1 where a choice was dropped.
    """

    layer: int
    x_TD: Tensor
    expert_TK: Tensor


class Answer(NamedTuple):
    """What it gets: rows of the experts ``[N, D]`` in send order, and how they were sent."""

    returned_ND: Tensor
    route: Route


@dataclass(eq=False)
class _Block:
    """A block of the pass.

    Attributes:
        first: number of its first node.
        entered: leaves in the place of what came in, and where those came from.
        x: hidden states of the experts; None where they have no gradient.
        answer: of the experts; its rows are a leaf.
        left: leaves in the place of what came out, and where those came from.
        roots: gradients of what came out.
    """

    first: int
    entered: list[tuple[Tensor, GradientEdge]]
    x: GradientEdge | None = None
    answer: Answer | None = None
    left: list[tuple[Tensor, GradientEdge]] = field(default_factory=list)
    roots: list[Root] = field(default_factory=list)


class _OfThread(threading.local):
    passage: Passage | None = None


class Here:
    """The passage whose model runs: forward in the thread that asks, or backward in any, for
    autograd has threads of its own."""

    def __init__(self) -> None:
        self._of_thread = _OfThread()
        self._in_backward: Passage | None = None

    @property
    def passage(self) -> Passage | None:
        return self._of_thread.passage or self._in_backward

    @contextmanager
    def forward_of(self, passage: Passage) -> Iterator[None]:
        """The calling thread runs the model of a passage, inside the block."""
        self._of_thread.passage = passage
        try:
            yield
        finally:
            self._of_thread.passage = None

    @contextmanager
    def backward_of(self, passage: Passage) -> Iterator[None]:
        """Backward of a passage runs, inside the block."""
        self._in_backward = passage
        try:
            yield
        finally:
            self._in_backward = None


class HasLoss(Protocol):
    """What a piece is run for."""

    @property
    def loss(self) -> Tensor: ...


AddGrad = Callable[[Tensor, Tensor], None]
"""Takes a parameter and a gradient of it."""


class Passage:
    """A pass of one piece.

    Args:
        call: the user's model, on the piece, and what is left of its output.
        add_grad: takes gradients of parameters; None where backward does not come.
        threads: for its coroutine.
        here: where the model finds the passage.
    """

    def __init__(
        self,
        call: Callable[[], HasLoss],
        add_grad: AddGrad | None,
        threads: ThreadPoolExecutor,
        here: Here,
    ) -> None:
        self._call, self._add_grad, self._here = call, add_grad, here
        self._coroutine = Coroutine(self._body, threads)
        self._random = RandomNumbers()
        self._ask: Ask | None = None
        self._blocks: list[_Block] = []
        self._firsts: list[int] = []  # of the parts between blocks
        self._pending = Pending()
        self._grads: dict[int, Tensor] = {}  # of where the graph was cut, by the leaf's identity
        self._loss: Tensor | None = None
        self.output: Any = None

    # What its caller does.

    def forward(self, answer: Answer | None) -> Question | None:
        """Run on, to the experts of the next layer; None at the end."""
        torch.clear_autocast_cache()  # of all threads: casts of weights are nodes of other pieces
        with self._random.own():
            turn = self._coroutine.resume(answer)
        if isinstance(turn, Returned):
            return None
        question: Question = turn.question
        return question

    def turn(self, seed: float) -> Tensor:
        """Backward from the loss to the outputs of the last layer's experts.

        Args:
            seed: gradient of the loss.

        Returns:
            The gradient of the outputs, ``[N, D]`` in send order.
        """
        loss, self._loss = self._loss, None
        assert loss is not None
        with self._here.backward_of(self):
            root = (get_gradient_edge(loss), torch.full_like(loss, seed))
            grad_ND = self._between(len(self._blocks), [root])
        assert grad_ND is not None
        return grad_ND

    def backward(self, layer: int, grad_TD: Tensor) -> Tensor | None:
        """Backward of a layer's block, and on to the outputs of the experts before; None at the
        first layer.

        Args:
            layer: its number.
            grad_TD: of the experts' inputs.
        """
        block = self._blocks[layer]
        roots = block.roots if block.x is None else [*block.roots, (block.x, grad_TD)]
        with self._here.backward_of(self):
            self._through(roots, block.first)
            entered = self._taken(block.entered)
            assert block.answer is not None
            self._grads.pop(id(block.answer.returned_ND), None)  # has travelled already
            self._blocks[layer] = _Block(0, [])
            return self._between(layer, entered)

    def abandon(self) -> None:
        """End it wherever it is."""
        self._coroutine.abandon()

    # What the model does, in the coroutine.

    def enter(self, given: Any) -> Any:
        """A block begins: what it is to be called with in the place of what was given."""
        if not torch.is_grad_enabled():
            return given
        block = _Block(next_number(), [])
        self._blocks.append(block)
        return tree_map(lambda x: _cut(x, block.entered), given)

    def leave(self, out: Any) -> Any:
        """A block ends: what its caller is to get in the place of what it returned."""
        if not torch.is_grad_enabled():
            return out
        self._firsts.append(next_number())
        return tree_map(lambda x: _cut(x, self._blocks[-1].left), out)

    def experts(self, layer: int, x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor) -> Tensor:
        """What the experts of a layer make of hidden states, ``[T, D]``."""
        if in_backward():  # activation checkpointing computes the block again
            answer = self._blocks[layer].answer
            assert answer is not None
            return _restored(answer, score_TK)
        if self._add_grad is not None and not torch.is_grad_enabled():
            raise ValueError(
                f"the MoE layer number {layer} runs in reentrant activation checkpointing, which "
                "would route its rows twice under strategy zebra; pass use_reentrant=False"
            )
        assert self._ask is not None
        answer = self._ask(Question(layer, x_TD.detach(), expert_TK))
        if self._add_grad is not None:
            answer = answer._replace(returned_ND=answer.returned_ND.detach().requires_grad_())
            block = self._blocks[-1]
            block.answer = answer
            block.x = get_gradient_edge(x_TD) if x_TD.requires_grad else None
        return _restored(answer, score_TK)

    def _body(self, ask: Ask) -> None:
        self._ask = ask
        with self._here.forward_of(self), torch.set_grad_enabled(self._add_grad is not None):
            self._firsts.append(next_number())
            self.output = self._call()
            if self._add_grad is not None:
                self._loss = self.output.loss

    # Backward.

    def _between(self, number: int, roots: Sequence[Root]) -> Tensor | None:
        """Backward of what lies before a block, and of the end of the block before that."""
        self._through(roots, self._firsts[number])
        if not number:
            return None
        block = self._blocks[number - 1]
        block.roots = [*self._taken(block.left), *self._pending.take(block.first)]
        assert block.answer is not None
        (grad_ND,) = torch.autograd.grad(
            [edge for edge, _ in block.roots],
            [block.answer.returned_ND],
            [grad for _, grad in block.roots],
            retain_graph=True,
            allow_unused=True,
        )
        return torch.zeros_like(block.answer.returned_ND) if grad_ND is None else grad_ND

    def _through(self, roots: Sequence[Root], first: int) -> None:
        """Backward of a part."""
        grads = self._grads
        for leaf, grad in backward_of_part(roots, first, self._pending):
            if isinstance(leaf, nn.Parameter):
                if self._add_grad is not None:
                    self._add_grad(leaf, grad)
            else:
                grads[id(leaf)] = grads[id(leaf)] + grad if id(leaf) in grads else grad

    def _taken(self, cuts: Sequence[tuple[Tensor, GradientEdge]]) -> list[Root]:
        """What was found where the graph was cut, and what it goes on to."""
        return [(edge, self._grads.pop(id(leaf))) for leaf, edge in cuts if id(leaf) in self._grads]


def _cut(x: Any, cuts: list[tuple[Tensor, GradientEdge]]) -> Any:
    """A leaf in the place of a tensor with a gradient."""
    if not isinstance(x, Tensor) or not x.requires_grad:
        return x
    leaf = x.detach().requires_grad_()
    cuts.append((leaf, get_gradient_edge(x)))
    return _Same.apply(leaf)


class _Same(torch.autograd.Function):
    """The tensor itself; a model may write over it, as it may not over a leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _restored(answer: Answer, score_TK: Tensor) -> Tensor:
    y_TD: Tensor = _Restored.apply(answer.returned_ND, score_TK, answer.route)
    return y_TD


class _Restored(torch.autograd.Function):
    """The weighted sum of a token's rows. Backward comes twice with the same gradients: see above.

    What it needs bypasses autograd's keeping, so that activation checkpointing has no reason to
    compute the block again before its turn."""

    @staticmethod
    def forward(ctx: Any, returned_ND: Tensor, score_TK: Tensor, route: Route) -> Tensor:
        ctx.kept, ctx.found = (route, returned_ND, score_TK), None
        return route.sum_by_token(returned_ND, score_TK)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        if ctx.found is None:
            route, returned_ND, score_TK = ctx.kept
            ctx.found = weighing_grads(route, returned_ND, score_TK, grad_TD)
            return *ctx.found, None
        found, ctx.found, ctx.kept = ctx.found, None, None
        return *found, None
