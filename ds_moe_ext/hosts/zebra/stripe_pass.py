# SPDX-License-Identifier: Apache-2.0
"""A stripe on its attention rank: its pieces go through the user's model, stage by stage, there and
back, each a ``StripePass``; and the coroutine in which a piece runs.

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
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map

from ds_moe_ext.core.rows import numbers
from ds_moe_ext.hosts.zebra.graph_cut import Pending, Root, backward_of_part, next_number
from ds_moe_ext.moe.route import Route, weighing_grads
from ds_moe_ext.schedule.executor import Carried
from ds_moe_ext.schedule.program import in_backward


class Question(NamedTuple):
    """What a piece wants of the experts."""

    layer: int
    x_TD: Tensor  # hidden states, detached
    expert_TK: Tensor  # chosen experts, int64; -1 where a choice was dropped
    score_TK: Tensor  # weight of each choice, detached


class Answer(NamedTuple):
    """What it gets: rows of the experts ``[N, D]`` in send order, and how they were sent; or their
    weighed sums by token, ``[T, D]``, and None."""

    returned_ND: Tensor
    route: Route | None


Grads = tuple[Tensor, Tensor | None]
"""Of hidden states, and of scores if these weighed rows on other ranks."""


Cut = tuple[Tensor, GradientEdge]
"""A leaf in the place of a tensor, and where that came from."""


@dataclass(eq=False)
class _Block:
    """A block of the pass."""

    first: int  # number of its first node
    entered: list[Cut] = field(default_factory=list)  # of what came in
    x: GradientEdge | None = None  # hidden states of the experts; None where they have no gradient
    score: GradientEdge | None = None  # their weights; likewise
    answer: Answer | None = None  # of the experts; its rows are a leaf
    left: list[Cut] = field(default_factory=list)  # of what came out
    roots: list[Root] = field(default_factory=list)  # gradients of what came out


class _OfThread(threading.local):
    stripe_pass: StripePass | None = None


class Here:
    """The stripe pass whose model runs: forward in the thread that asks, or backward in any, for
    autograd has threads of its own.

    Args:
        tracker: of generators that the host knows by name, as Megatron's; None where it has none.
    """

    def __init__(self, tracker: Any = None) -> None:
        self.tracker = tracker
        self._of_thread = _OfThread()
        self._in_backward: StripePass | None = None

    @property
    def stripe_pass(self) -> StripePass | None:
        return self._of_thread.stripe_pass or self._in_backward

    @contextmanager
    def forward_of(self, stripe_pass: StripePass) -> Iterator[None]:
        """The calling thread runs the model of a stripe pass, inside the block."""
        self._of_thread.stripe_pass = stripe_pass
        try:
            yield
        finally:
            self._of_thread.stripe_pass = None

    @contextmanager
    def backward_of(self, stripe_pass: StripePass) -> Iterator[None]:
        """Backward of a stripe pass runs, inside the block."""
        self._in_backward = stripe_pass
        try:
            yield
        finally:
            self._in_backward = None


AddGrad = Callable[[Tensor, Tensor], None]
"""Takes a parameter and a gradient of it."""

Seed = float | Tensor | tuple[Tensor, ...]
"""Gradient of a loss; of the outputs of a pipeline's stage, a tensor each."""


class StripePass:
    """A pass of one piece.

    Args:
        call: the user's model, on the piece; what it gives has a ``loss``, or where there are
            several outputs with gradients a tuple of them by that name.
        add_grad: takes gradients of parameters; None where backward does not come.
        threads: for its coroutine.
        here: where the model finds the stripe pass.
    """

    def __init__(
        self,
        call: Callable[[], Any],
        add_grad: AddGrad | None,
        threads: ThreadPoolExecutor,
        here: Here,
    ) -> None:
        self._call, self._add_grad, self._here = call, add_grad, here
        self._coroutine = Coroutine(self._body, threads)
        self._random = RandomNumbers(here.tracker)
        self._ask: Ask | None = None
        self._blocks: list[_Block] = []
        self._firsts: list[int] = []  # of the parts between blocks
        self._pending = Pending()
        self._grads: dict[int, Tensor] = {}  # of where the graph was cut, by the leaf's identity
        self._ends: tuple[Tensor, ...] = ()  # where backward begins
        self.output: Any = None

    # What its caller does.

    def forward(self, answer: Answer | None) -> Question | None:
        """Run on, to the experts of the next layer; None at the end."""
        torch.clear_autocast_cache()  # of all threads: casts of weights are nodes of other pieces
        with self._random.own():
            turn_around = self._coroutine.resume(answer)
        if isinstance(turn_around, Returned):
            return None
        question: Question = turn_around.question
        return question

    def turn_around(self, seed: Seed) -> Tensor:
        """Backward from the loss, whose gradient is ``seed``, to the outputs of the last layer's
        experts; their gradient, ``[N, D]`` in send order."""
        ends, self._ends = self._ends, ()
        assert ends
        with self._here.backward_of(self):
            roots = [
                (get_gradient_edge(end), x if isinstance(x, Tensor) else torch.full_like(end, x))
                for end, x in zip(ends, seed if isinstance(seed, tuple) else (seed,), strict=True)
            ]
            grad_ND = self._between(len(self._blocks), roots)
        assert grad_ND is not None
        return grad_ND

    def backward(self, layer: int, grads: Grads) -> Tensor | None:
        """Backward of a layer's block, from the gradients of the experts' inputs, and on to the
        outputs of the experts before; None at the first layer."""
        block = self._blocks[layer]
        inputs = zip((block.x, block.score), grads)
        found = [(edge, grad) for edge, grad in inputs if edge is not None and grad is not None]
        roots = [*block.roots, *found]
        with self._here.backward_of(self):
            self._through(roots, block.first)
            entered = self._taken(block.entered)
            assert block.answer is not None
            self._grads.pop(id(block.answer.returned_ND), None)  # has travelled already
            self._blocks[layer] = _Block(0)
            return self._between(layer, entered)

    def grad_of(self, given: Tensor) -> Tensor | None:
        """Behind backward, the gradient of a leaf that the model was given; None if it has none."""
        return self._grads.pop(id(given), None)

    def abandon(self) -> None:
        """End it wherever it is."""
        self._coroutine.abandon()

    # What the model does, in the coroutine.

    def enter(self, given: Any) -> Any:
        """A block begins: what it is to be called with in the place of what was given."""
        if not torch.is_grad_enabled():
            return given
        block = _Block(next_number())
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
            return _Restored.of(answer, score_TK)
        if self._add_grad is not None and not torch.is_grad_enabled():
            raise ValueError(
                f"the MoE layer number {layer} runs in reentrant activation checkpointing, "
                "which would route its tokens twice under strategy zebra; pass "
                "use_reentrant=False"
            )
        assert self._ask is not None
        answer = self._ask(Question(layer, x_TD.detach(), expert_TK, score_TK.detach()))
        if self._add_grad is not None:
            answer = answer._replace(returned_ND=answer.returned_ND.detach().requires_grad_())
            block = self._blocks[-1]
            block.answer = answer
            block.x = get_gradient_edge(x_TD) if x_TD.requires_grad else None
            block.score = get_gradient_edge(score_TK) if score_TK.requires_grad else None
        return _Restored.of(answer, score_TK)

    def _body(self, ask: Ask) -> None:
        self._ask = ask
        with self._here.forward_of(self), torch.set_grad_enabled(self._add_grad is not None):
            self._firsts.append(next_number())
            self.output = self._call()
            if self._add_grad is not None:
                loss = self.output.loss
                self._ends = loss if isinstance(loss, tuple) else (loss,)

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

    def _taken(self, cuts: Sequence[Cut]) -> list[Root]:
        """What was found where the graph was cut, and what it goes on to."""
        return [(edge, self._grads.pop(id(leaf))) for leaf, edge in cuts if id(leaf) in self._grads]


def _cut(x: Any, cuts: list[Cut]) -> Any:
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


class _Restored(torch.autograd.Function):
    """The weighted sum of a token's rows. Backward comes twice with the same gradients: see above.

    What it needs bypasses autograd's keeping, so that activation checkpointing has no reason to
    compute the block again before its turn."""

    @classmethod
    def of(cls, answer: Answer, score_TK: Tensor) -> Tensor:
        if answer.route is None:
            return _Same.apply(answer.returned_ND)
        y_TD: Tensor = cls.apply(answer.returned_ND, score_TK, answer.route)
        return y_TD

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


IN_ORDER = (
    "; under strategy zebra every forward calls every layer once, in the order in which the model "
    "has them; leave a layer out with moe_layer_pattern"
)


@dataclass(eq=False)
class Stripe:
    """The pieces that run by turns, and travel together."""

    stripe_passes: Sequence[StripePass]  # one a piece
    seeds: Sequence[Seed]  # of each
    _lengths: dict[int, list[int]] = field(default_factory=dict)  # tokens of the pieces, by layer
    _rows: dict[int, list[Tensor]] = field(default_factory=dict)  # which of them are whose

    def forward(self, layer: int, returned: Answer | None) -> Question:
        """On to the experts of a layer."""
        asked = self._resumed(layer, returned)
        questions = [question for question in asked if question is not None]
        where = [question.layer for question in questions]
        if where != [layer] * len(asked):
            raise RuntimeError(
                f"the model called the experts of MoE layer {where or 'none'} but layer "
                f"{layer} was next{IN_ORDER}"
            )
        self._lengths[layer] = [question.x_TD.shape[0] for question in questions]
        if len(questions) == 1:
            return questions[0]
        _, *tensors = zip(*questions)
        return Question(layer, *map(torch.cat, tensors))

    def finish(self, layer: int, returned: Answer) -> None:
        """On to the end, behind the experts of the last of so many layers."""
        for question in self._resumed(layer, returned):
            if question is not None:
                raise RuntimeError(
                    f"the model called the experts of MoE layer {question.layer} after those "
                    f"of all {layer}{IN_ORDER}"
                )

    def turn_around(self, layer: int, seeds: Sequence[Seed]) -> Tensor:
        """Backward from the losses to what the last layer's experts returned."""
        pairs = zip(self.stripe_passes, seeds)
        return self._joined(layer, [stripe_pass.turn_around(seed) for stripe_pass, seed in pairs])

    def backward(self, layer: int, grads: Grads) -> Tensor | None:
        """Backward of a layer's block, and on to what the experts before it returned."""
        lengths, (grad_TD, grad_TK) = self._lengths[layer], grads
        scores = [None] * len(lengths) if grad_TK is None else grad_TK.split(lengths)
        parts = zip(self.stripe_passes, grad_TD.split(lengths), scores)
        found = [stripe_pass.backward(layer, (x, score)) for stripe_pass, x, score in parts]
        returned = [grad for grad in found if grad is not None]
        return self._joined(layer - 1, returned) if returned else None

    def _resumed(self, layer: int, returned: Answer | None) -> list[Question | None]:
        answers: list[Answer | None] = [returned] * len(self.stripe_passes)
        if returned is not None and len(self.stripe_passes) > 1:
            lengths, rows = self._lengths[layer - 1], []
            for n, stop in enumerate(np.cumsum(lengths).tolist()):
                answers[n], own = _within(returned, stop - lengths[n], stop)
                rows += own
            self._rows[layer - 1] = rows
        return [
            stripe_pass.forward(answer) for stripe_pass, answer in zip(self.stripe_passes, answers)
        ]

    def _joined(self, layer: int, grads: Sequence[Tensor]) -> Tensor:
        """Gradients of rows in the order in which those of all pieces returned."""
        if len(grads) == 1:
            return grads[0]
        if not self._rows[layer]:
            return torch.stack(list(grads)).sum(dim=0)
        together = torch.cat(list(grads))
        return torch.empty_like(together).index_copy_(0, torch.cat(self._rows[layer]), together)


def _within(answer: Answer, start: int, stop: int) -> tuple[Answer, list[Tensor]]:
    """The answer for some tokens alone, and which rows are theirs, if not all. Waits for the device
    where it does not know them."""
    returned_ND, route = answer
    if route is None:
        rows = numbers(len(returned_ND), returned_ND.device)[start:stop]
        return Answer(returned_ND[start:stop], None), [rows]
    if route.padded_row_N is not None:
        return _within_padded(returned_ND, route, start, stop), []
    rows = torch.nonzero((route.token_N >= start) & (route.token_N < stop)).flatten()
    own = replace(
        route,
        choice_N=route.choice_N[rows] - start * route.top_k,
        token_N=route.token_N[rows] - start,
        num_tokens=stop - start,
    )
    return Answer(returned_ND.index_select(0, rows), own), [rows]


def _within_padded(returned_ND: Tensor, route: Route, start: int, stop: int) -> Answer:
    """The same where rows are padded: to each piece those of the others are padding, too, so that
    nobody waits for how many are whose."""
    num_tokens = stop - start
    assert route.padded_row_N is not None
    first, num_choices = start * route.top_k, num_tokens * route.top_k
    choice_N = route.choice_N - first
    choice_N = choice_N.where((choice_N >= 0) & (choice_N < num_choices), num_choices)
    own = replace(
        route,
        choice_N=choice_N,
        token_N=choice_N // route.top_k,
        num_tokens=num_tokens,
        padded_row_N=route.padded_row_N[first : first + num_choices],
    )
    return Answer(returned_ND, own)


# Code that runs by turns with its caller, in a thread of its own.
#
# So a model that knows nothing of micro-batches can pause in the middle of its forward, while other
# micro-batches go on. Only one of the two threads runs at a time.


class Asked(NamedTuple):
    """What it paused with: it goes on with the answer."""

    question: Any


class Returned(NamedTuple):
    """What it ended with."""

    result: Any


class Abandoned(BaseException):
    """Ends code that nobody will resume; ``except Exception`` does not catch it."""


class Coroutine:
    """Code that has not begun, has paused, or has ended. ``body`` is given ``ask``, which pauses it
    with a question and returns the answer; one of the threads is its own until it ends."""

    def __init__(self, body: Callable[[Ask], Any], threads: ThreadPoolExecutor) -> None:
        self._body: Callable[[Ask], Any] | None = body
        self._threads = threads
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._turns: SimpleQueue[Asked | Returned | BaseException] = SimpleQueue()
        self._is_running = False

    def resume(self, answer: Any = None) -> Asked | Returned:
        """Let it run until it pauses or ends, with the caller's autocast and stream. Raises what
        the code raised."""
        state = Carried.of_caller()
        if self._is_running:
            self._answers.put((answer, state))
        else:
            self._is_running = True
            # Not kept on self: it may be a method of who has the coroutine. A cycle would hold the
            # iterator of a data loader, whose workers must end before Python exits.
            body, self._body = self._body, None
            assert body is not None, "it runs once"
            self._threads.submit(self._run, body, state)
        turn_around = self._turns.get()
        if isinstance(turn_around, BaseException):
            self._is_running = False
            raise turn_around
        self._is_running = isinstance(turn_around, Asked)
        return turn_around

    def abandon(self) -> None:
        """End it where it has paused."""
        if self._is_running:
            self._is_running = False
            self._answers.put((Abandoned(), None))

    def _run(self, body: Callable[[Ask], Any], state: Carried) -> None:
        try:
            with state.entered():
                self._turns.put(Returned(body(self._ask)))
        except BaseException as error:
            self._turns.put(error)

    def _ask(self, question: Any) -> Any:
        self._turns.put(Asked(question))
        answer, state = self._answers.get()
        if isinstance(answer, Abandoned):
            self._answers.put((answer, None))  # for code that caught it, and asks again
            raise answer
        state.follow()
        return answer


Ask = Callable[[Any], Any]
"""Pauses with a question; returns the answer."""


class RandomState(NamedTuple):
    """Of torch's generators of random numbers: the host's, and that of the CUDA device in use; None
    without one."""

    host: Tensor
    device: Tensor | None

    @classmethod
    def now(cls) -> RandomState:
        """As it is."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if _devices() else None)

    @contextmanager
    def again(self) -> Iterator[None]:
        """It is torch's inside the block; what was there before is so again behind it."""
        with torch.random.fork_rng(_devices()):
            torch.set_rng_state(self.host)
            if self.device is not None:
                torch.cuda.set_rng_state(self.device)
            yield


class RandomNumbers:
    """Of a coroutine's own: it draws as if it never paused, whoever draws in between.

    Activation checkpointing relies on that: what it computes again it computes in one go.

    Args:
        tracker: as of ``Here``.
    """

    def __init__(self, tracker: Any = None) -> None:
        self._state: RandomState | None = None
        self._tracker = tracker
        self._tracked: dict[str, Any] = {}  # what the tracker knows, in this coroutine

    @contextmanager
    def own(self) -> Iterator[None]:
        """They are torch's inside the block, and are kept for the next one."""
        with self._begun() if self._state is None else self._state.again():
            with swapped(self._tracker, self._tracked):
                yield
            self._state = RandomState.now()

    @contextmanager
    def _begun(self) -> Iterator[None]:
        seed = int(torch.randint(2**62, ()))
        if self._tracker is not None:
            self._tracked = {**vars(self._tracker), "states_": _reseeded(self._tracker, seed)}
        with torch.random.fork_rng(_devices()):
            torch.manual_seed(seed)
            yield


@contextmanager
def swapped(tracker: Any, own: dict[str, Any]) -> Iterator[None]:
    """A tracker of generators knows this inside the block, and what it knows in the end is kept
    there; nothing happens without one."""
    if tracker is None:
        yield
        return
    others = dict(vars(tracker))
    vars(tracker).update(own)
    try:
        yield
    finally:
        own.update(vars(tracker))
        vars(tracker).update(others)


def _reseeded(tracker: Any, seed: int) -> dict[str, Any]:
    """States of a tracker's generators for a coroutine, by name: seeds that differ, by name and by
    rank, differ as before. Those for CUDA graphs, which are no tensors, stay."""
    states: dict[str, Any] = tracker.get_states()
    generator = torch.Generator("cuda" if _devices() else "cpu")
    for name, state in states.items():
        if isinstance(state, Tensor):
            generator.set_state(state)
            generator.manual_seed(generator.initial_seed() ^ seed)
            states[name] = generator.get_state()
    return states


def _devices() -> list[int]:
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.cuda.current_device()] if has_cuda else []
