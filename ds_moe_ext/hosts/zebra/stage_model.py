# SPDX-License-Identifier: Apache-2.0
"""A pipeline's stage whose forward is the forward of a striped step, in the place of the user's.

ZP groups lie within a stage. Every rank, of either role, has micro-batches of its own, which it
gets from a rank of the stage before and hands on to one of the next, as the host's schedule says.
The attention ranks of a group run the samples of all of it: outputs go back to the rank whose
samples they are of, their gradients come from there, and those of inputs go there. So forward is a
node of autograd on every rank, with a backward of its own, and several are under way at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core.comm import as_bytes, exchange, gather_objects
from ds_moe_ext.hosts.zebra.batches import Call, Shared
from ds_moe_ext.hosts.zebra.role_exchange import GradientSums
from ds_moe_ext.hosts.zebra.stripe_model import Ahead, StripedModel
from ds_moe_ext.hosts.zebra.stripe_pass import Stripe, StripePass
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.schedule.program import ran_before
from ds_moe_ext.schedule.stripes import Samples
from ds_moe_ext.strategies.settings import BLOCK


def moved_by(strategy: Strategy) -> list[int] | None:
    """Experts that each expert rank gives to attention ranks, of each MoE layer of all stages
    (Asym-EA); None where the strategy has no such key: one of your own may name others so."""
    moved = getattr(strategy, "moved", None)
    return moved if isinstance(moved, list) else None


def of_its_stage(strategy: Strategy, num_layers: int, stages: dist.ProcessGroup) -> Strategy:
    """With the numbers of this pipeline stage's MoE layers, of which there are ``num_layers``.
    Collective, over the ranks of a pipeline, in the order of ``stages``. Raises ValueError where
    they are not those of the model."""
    moved, keys = moved_by(strategy), cast(Any, strategy)
    if moved is None:
        return strategy
    counts = gather_objects(num_layers, stages)
    if len(moved) != sum(counts):
        raise ValueError(
            f"{BLOCK}.zebra.moved has {len(moved)} numbers, but there are {sum(counts)} MoE "
            "layers; give one a layer"
        )
    first = sum(counts[: stages.rank()])
    own: Strategy = replace(keys, moved=moved[first : first + num_layers])
    return own


class _Like(NamedTuple):
    """What an output of a piece is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool  # it has a gradient

    @classmethod
    def of(cls, x: Tensor) -> _Like:
        return cls(tuple(x.shape), x.dtype, x.requires_grad)

    @property
    def is_cut(self) -> bool:
        """Whether its first dim is of samples, as that of all outputs with two dims or more. Any
        other is a mean over samples, or, if it has no floating-point numbers, of all alike."""
        return len(self.shape) > 1


class _Made(NamedTuple):
    """What the user's stage returned for a piece."""

    outputs: tuple[Tensor, ...]
    is_tuple: bool

    @property
    def loss(self) -> tuple[Tensor, ...]:
        """Where backward begins."""
        return tuple(x for x in self.outputs if x.requires_grad)


@dataclass(eq=False)
class _Piece:
    """Samples of a rank's batch, and where they run."""

    samples: Samples
    holder: int  # place of the attention rank
    weight: float  # their share of the batch that they are of
    made: tuple[_Like, ...] = ()  # what its outputs are like
    # On the attention rank alone:
    inputs: tuple[Tensor, ...] = ()  # leaves, where they have a gradient
    stripe_pass: StripePass | None = None


class _Passage(NamedTuple):
    """A micro-batch that goes through the stage."""

    pieces: Sequence[_Piece]  # of the whole ZP group
    sums: GradientSums  # of this rank's weights
    inputs: Sequence[Tensor]  # of this rank that have a gradient
    cut: Sequence[bool]  # for each of these, whether its first dim is of samples
    ahead: Ahead


class StripedStage(StripedModel):
    """What is called in the place of the stage's forward. Collective over the ZP group."""

    def __call__(self, given: Any) -> Any:
        is_graded, is_training = torch.is_grad_enabled(), self.model.training
        is_tuple = isinstance(given, tuple)
        inputs: tuple[Tensor, ...] = given if is_tuple else (given,)
        learns = [is_graded and x.requires_grad for x in inputs]
        mode = f"{'train' if is_training else 'eval'}, gradients of {learns if is_graded else None}"
        shared = self.batches.share(tuple(x.detach() for x in inputs), {}, mode)
        sums = GradientSums()
        add_grad = sums.add if is_graded else None
        pieces = self._pieces(shared)
        own = (piece for piece in pieces if piece.holder == self.batches.place)
        stripes = []
        for calls in filter(None, shared.calls):
            for call, piece in (held := [(call, next(own)) for call in calls]):
                piece.inputs = _leaves(call, learns)
                ran = functools.partial(self._ran, piece.inputs, is_tuple=is_tuple)
                piece.stripe_pass = StripePass(ran, add_grad, self.stack.threads, self.stack.here)
            passes = [piece.stripe_pass for _, piece in held if piece.stripe_pass is not None]
            stripes.append(Stripe(passes, [()] * len(passes)))
        if add_grad is None:
            control = self.batches.control if self.checks else None
            self.stack.run(len(shared.calls), stripes, None, counts=is_training, control=control)
            return self._returned(pieces)
        ahead = self.stack.ahead(len(shared.calls), stripes, add_grad, counts=is_training)
        made = self._returned(pieces)
        outputs = made if isinstance(made, tuple) else (made,)
        is_cut = [f"[{n}]" in shared.cut for n in range(len(inputs))]
        passage = _Passage(
            pieces,
            sums,
            [x.detach() for x, learns_x in zip(inputs, learns) if learns_x],
            [cut for cut, learns_x in zip(is_cut, learns) if learns_x],
            ahead,
        )
        learning = [x for x, learns_x in zip(inputs, learns) if learns_x]
        wanted = [p for p in self.model.parameters() if p.requires_grad]
        begun = torch.zeros((), requires_grad=True)  # all weights of this rank may be frozen
        handed = _HandOn.apply(self, passage, outputs, wanted, begun, *learning, *wanted)
        return handed if isinstance(made, tuple) else handed[0]

    def _pieces(self, shared: Shared) -> list[_Piece]:
        """Of the group, in the order in which each attention rank runs its own."""
        return [
            _Piece(samples, holder, samples.weight(shared.num_samples_C))
            for holder, stripes in zip(self.batches.roles.attention_ep_ranks, shared.pieces)
            for stripe in stripes
            for samples in stripe
        ]

    def _ran(self, inputs: tuple[Tensor, ...], *, is_tuple: bool) -> _Made:
        made = self.forward(inputs if is_tuple else inputs[0])
        outputs = made if isinstance(made, tuple) else (made,)
        if unknown := [type(x).__name__ for x in outputs if not isinstance(x, Tensor)]:
            raise ValueError(
                f"a stage returned {', '.join(unknown)} among its outputs; under strategy zebra "
                "let it return a tensor, or a tuple of tensors"
            )
        return _Made(outputs, isinstance(made, tuple))

    def _returned(self, pieces: Sequence[_Piece]) -> Any:
        """What the stage makes of this rank's batch, without a graph. Collective."""
        made: list[_Made] = [p.stripe_pass.output for p in pieces if p.stripe_pass is not None]
        described = [(each.is_tuple, tuple(map(_Like.of, each.outputs))) for each in made]
        reported = [iter(theirs) for theirs in gather_objects(described, self.batches.control)]
        is_tuple = False
        for piece in pieces:
            is_tuple, piece.made = next(reported[piece.holder])
            for like in piece.made:
                if like.is_cut and like.shape[0] != piece.samples.num_samples:
                    raise ValueError(
                        f"a stage made an output of shape {list(like.shape)} from "
                        f"{piece.samples.num_samples} sample(s); under strategy zebra the first "
                        "dim of an output with several is that of samples: give it one"
                    )
        arrived = self._moved(
            pieces,
            lambda piece: [x.detach() for x in piece.stripe_pass.output.outputs],
            lambda piece: [self._empty(like.shape, like.dtype) for like in piece.made],
        )
        own = self._of_own_batch(pieces)
        outputs = tuple(
            _put_together(own, column, is_cut=like.is_cut, is_mean=True)
            for like, column in zip(own[0].made, zip(*arrived))
        )
        return outputs if is_tuple else outputs[0]

    def back(self, passage: _Passage, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of this rank's inputs that have one, from those of such outputs. Collective."""
        pieces, inputs = passage.pieces, list(zip(passage.inputs, passage.cut))
        seeds = self._moved(
            pieces,
            lambda piece: [
                _part(grad, piece) if like.is_cut else grad * piece.weight
                for like, grad in zip(_learning(piece), grads)
            ],
            lambda piece: [self._empty(like.shape, like.dtype) for like in _learning(piece)],
            is_back=True,
        )
        left = iter(seeds)
        for stripe in passage.ahead.stripes:
            stripe.seeds = [tuple(next(left)) for _ in stripe.stripe_passes]
        self.stack.back(passage.ahead)
        passage.sums.reach(self.model.parameters())
        arrived = self._moved(
            pieces,
            lambda piece: [_grad_of(piece, x) for x in piece.inputs if x.requires_grad],
            lambda piece: [torch.empty_like(_part(x, piece) if cut else x) for x, cut in inputs],
        )
        own = self._of_own_batch(pieces)
        return [
            _put_together(own, column, is_cut=cut, is_mean=False)
            for (_, cut), column in zip(inputs, zip(*arrived))
        ]

    def _of_own_batch(self, pieces: Sequence[_Piece]) -> list[_Piece]:
        return [piece for piece in pieces if piece.samples.sender == self.batches.place]

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.batches.device)

    def _moved(
        self,
        pieces: Sequence[_Piece],
        sent: Callable[[Any], Sequence[Tensor]],
        landing: Callable[[_Piece], Sequence[Tensor]],
        *,
        is_back: bool = False,
    ) -> list[Sequence[Tensor]]:
        """What arrives at this rank from where pieces run, of those of its batch; or the other way
        back, of those that it runs. In their order. Collective."""
        place = self.batches.place
        receives, sends, arrived = [], [], list[Sequence[Tensor]]()
        for piece in pieces:
            ends = (piece.holder, piece.samples.sender)
            sender, receiver = ends[::-1] if is_back else ends
            tensors = [x.contiguous() for x in sent(piece)] if sender == place else ()
            if receiver == place:
                arrived.append(tensors if sender == place else landing(piece))
            if receiver == place != sender:
                receives += [(as_bytes(x), sender) for x in arrived[-1] if x.numel()]
            if sender == place != receiver:
                sends += [(as_bytes(x), receiver) for x in tensors if x.numel()]
        exchange(receives, sends, self.batches.group)
        return arrived


def _leaves(call: Call, learns: Sequence[bool]) -> tuple[Tensor, ...]:
    """What a piece is called with."""
    return tuple(
        x.detach().requires_grad_() if learns_x else x for x, learns_x in zip(call.args, learns)
    )


def _learning(piece: _Piece) -> Iterator[_Like]:
    return (like for like in piece.made if like.learns)


def _part(x: Tensor, piece: _Piece) -> Tensor:
    return x[piece.samples.start : piece.samples.stop]


def _grad_of(piece: _Piece, x: Tensor) -> Tensor:
    assert piece.stripe_pass is not None
    grad = piece.stripe_pass.grad_of(x)
    return torch.zeros_like(x) if grad is None else grad


def _put_together(
    pieces: Sequence[_Piece], parts: Sequence[Tensor], *, is_cut: bool, is_mean: bool
) -> Tensor:
    """What the pieces of a batch have of it, as of the whole."""
    if is_cut:
        order = sorted(range(len(pieces)), key=lambda n: pieces[n].samples.start)
        return torch.cat([parts[n] for n in order])
    if not parts[0].is_floating_point():
        return parts[0].clone()
    weights = [piece.weight if is_mean else 1.0 for piece in pieces]
    return torch.stack([x * weight for x, weight in zip(parts, weights)]).sum(0)


class _HandOn(torch.autograd.Function):
    """The outputs of a micro-batch; its backward is that of the stage, and gives the gradients of
    inputs and of weights."""

    @staticmethod
    def forward(
        ctx: Any,
        stage: StripedStage,
        passage: _Passage,
        outputs: tuple[Tensor, ...],
        wanted: Sequence[Tensor],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.found = stage, passage, wanted
        ctx.learns = [like.learns for like in stage._of_own_batch(passage.pieces)[0].made]
        ctx.mark_non_differentiable(*(x for x, learns in zip(outputs, ctx.learns) if not learns))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.found is None:
            raise RuntimeError(ran_before("the outputs of a striped stage"))
        (stage, passage, wanted), ctx.found = ctx.found, None
        found = stage.back(passage, [grad for grad, learns in zip(grads, ctx.learns) if learns])
        # The host takes means over the ranks of a role; wanted is that over all.
        roles, device = stage.stack.roles, stage.batches.device
        share = len(roles.attention_ep_ranks) / roles.size
        factor = torch.tensor(stage.gradients.factor * share, dtype=torch.float64, device=device)
        return None, None, None, None, None, *found, *(passage.sums.take(p, factor) for p in wanted)
