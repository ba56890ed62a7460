# SPDX-License-Identifier: Apache-2.0
"""Pieces through a model in turns, all in one process, beside plain autograd on the same model.

Spec hetermoe.md: rules 15 to 21 and G11. Shape letters: B samples, T positions or tokens, K
choices, N rows, E experts, D model width, F expert width.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple
from unittest import mock
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.hosts.zebra import stripe_model
from ds_moe_ext.hosts.zebra.role_exchange import GradientSums
from ds_moe_ext.hosts.zebra.stripe_pass import Answer, Here, Question, StripePass
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.route import one_rank_route
from ds_moe_ext.schedule.task import ChunkRange
from ds_moe_ext.testing import dense_experts

VOCABULARY, LENGTH, D, F, EXPERTS, TOP_K = 19, 5, 8, 6, 4, 2
STRIPE = ChunkRange(0, 1)


# Models.


class Experts(nn.Module):
    """All experts on the spot; or, in a stripe pass, a question."""

    def __init__(self) -> None:
        super().__init__()
        self.up_EFD = nn.Parameter(torch.randn(EXPERTS, 2 * F, D) * 0.4)
        self.down_EDF = nn.Parameter(torch.randn(EXPERTS, D, F) * 0.4)
        self.layer, self.here = 0, Here()

    def forward(self, x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor) -> Tensor:
        stripe_pass = self.here.stripe_pass
        if stripe_pass is None:
            return dense_experts(x_TD, expert_TK, score_TK, self.up_EFD, self.down_EDF)
        return stripe_pass.experts(self.layer, x_TD, expert_TK, score_TK)


class Attention(nn.Module):
    """Causal mean of values, gated: quick, and mixes positions."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(D, D), nn.Linear(D, D)
        self.forwards = 0

    def forward(self, x_BTD: Tensor) -> Tensor:
        self.forwards += 1
        count_T1 = torch.arange(1, x_BTD.shape[1] + 1)[:, None]
        return self.value(x_BTD).cumsum(dim=1) / count_T1 * torch.sigmoid(self.gate(x_BTD))


_CAPTURED: ContextVar[list[Tensor] | None] = ContextVar("captured", default=None)


def _capture(_: nn.Module, given: Any, logits_TE: Tensor) -> None:
    captured = _CAPTURED.get()
    if captured is not None:
        captured.append(logits_TE)


class Moe(nn.Module):
    """Router and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, EXPERTS, bias=False)
        nn.init.normal_(self.router.weight, std=0.7)
        self.router.register_forward_hook(_capture)
        self.experts = Experts()

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Output and balance loss."""
        x_TD = x_BTD.flatten(0, 1)
        probability_TE = self.router(x_TD).softmax(dim=-1)
        score_TK, expert_TK = probability_TE.topk(TOP_K)
        y_TD = self.experts(x_TD, expert_TK, score_TK)
        share_E = functional.one_hot(expert_TK, EXPERTS).sum(dim=(0, 1)) / expert_TK.numel()
        return y_TD.view_as(x_BTD), (probability_TE.mean(dim=0) * share_E).sum() * EXPERTS


class Block(nn.Module):
    """Attention and experts with a residual around each."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention, self.moe = Attention(), Moe()

    def forward(self, x_BTD: Tensor) -> Any:
        u_BTD = self.attended(x_BTD)
        y_BTD, aux = self.moe(self.norm(u_BTD))
        return u_BTD + y_BTD, aux

    def attended(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.attention(self.attention_norm(x_BTD))


class SharedAfter(Block):
    """A shared expert reads the same hidden states behind the experts; so does a gate of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.shared_gate = nn.Linear(D, D), nn.Linear(D, 1)

    def forward(self, x_BTD: Tensor) -> Any:
        u_BTD = self.attended(x_BTD)
        z_BTD = self.norm(u_BTD)
        y_BTD, aux = self.moe(z_BTD)
        shared_BTD = torch.sigmoid(self.shared_gate(z_BTD)) * self.shared(z_BTD).tanh()
        return x_BTD * 0.5 + u_BTD + y_BTD * shared_BTD.sigmoid() + shared_BTD, aux


class PostNorm(Block):
    """What follows the experts keeps tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.last_norm = nn.LayerNorm(D)

    def forward(self, x_BTD: Tensor) -> Any:
        y_BTD, aux = super().forward(x_BTD)
        return self.last_norm(y_BTD), aux


class Dropping(Block):
    """Dropout behind attention and behind the experts; the masks are seen, or given."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[tuple[int, str], list[Tensor]] = {}  # of a piece by its samples
        self.draws = True

    def forward(self, x_BTD: Tensor) -> Any:
        u_BTD = self.dropped(self.attended(x_BTD), "attention")
        y_BTD, aux = self.moe(self.norm(u_BTD))
        return u_BTD + self.dropped(y_BTD, "experts"), aux

    def dropped(self, x_BTD: Tensor, place: str) -> Tensor:
        drawn = self.masks.setdefault((len(x_BTD), place), [])
        if self.draws:
            drawn.append((torch.rand(x_BTD.shape) < 0.7).to(x_BTD.dtype))
            return x_BTD * drawn[-1]
        return x_BTD * drawn[0]


class NoAux(Block):
    """Returns a tensor; the loss reads the router by a hook."""

    def forward(self, x_BTD: Tensor) -> Any:
        return super().forward(x_BTD)[0]


class InPlace(Block):
    """Writes the residual over what it was given, and over what the experts returned."""

    def forward(self, x_BTD: Tensor) -> Any:
        x_BTD += self.attention(self.attention_norm(x_BTD.clone()))
        y_BTD, aux = self.moe(self.norm(x_BTD.clone()))
        y_BTD += x_BTD
        return y_BTD, aux


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + torch.tanh(self.linear(self.norm(x_BTD)))


class Result(NamedTuple):
    loss: Tensor


class Model(nn.Module):
    """Embedding, blocks with experts or without, head."""

    is_tied = False
    captures = False

    def __init__(self, *blocks: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.blocks = nn.ModuleList(kind() for kind in blocks)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCABULARY, bias=False)
        if self.is_tied:
            self.head.weight = self.embedding.weight

    @property
    def cut(self) -> list[nn.Module]:
        """What the graph is cut around."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def hidden(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(())
        for block in self.blocks:
            out = block(x_BTD)
            x_BTD, aux = out if isinstance(out, tuple) else (out, 0.0)
            total = total + aux
        return x_BTD, total

    def forward(self, token_BT: Tensor) -> Result:
        token = _CAPTURED.set([] if self.captures else None)
        x_BTD, aux = self.hidden(self.embedding(token_BT))
        captured = _CAPTURED.get() or []
        _CAPTURED.reset(token)
        of_routers = sum((logits.square().mean() for logits in captured), torch.zeros(()))
        logits_BTV = self.head(self.norm(x_BTD))
        loss = functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), token_BT[:, 1:].flatten())
        return Result(loss + 0.3 * aux + 0.2 * of_routers)


class Tied(Model):
    is_tied = True


class Captured(Model):
    captures = True


class WithoutList(Model):
    """Its layers are attributes: no list of modules is around the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), SharedAfter(), NoAux()

    @property
    def cut(self) -> list[nn.Module]:
        return [block.moe for block in (self.first, self.second, self.third)]

    def hidden(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD, first_aux = self.first(x_BTD)
        x_BTD, second_aux = self.second(x_BTD)
        return self.third(x_BTD), first_aux + second_aux


class Biased(Model):
    """Blocks are handed a weight that they hand on; and what the first one made, at the end."""

    def __init__(self) -> None:
        super().__init__(*[Handing] * 3)
        self.bias = nn.Parameter(torch.randn(D) * 0.1)

    def hidden(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        bias, kept = self.bias, []
        for block in self.blocks:
            x_BTD, bias, made_BTD = block(x_BTD, bias=bias)
            kept.append(made_BTD)
        return x_BTD + kept[0] * kept[1].sigmoid(), bias.sum()


class Handing(Block):
    def forward(self, x_BTD: Tensor, bias: Tensor | None = None) -> Any:
        y_BTD, _ = super().forward(x_BTD + bias)
        return y_BTD, bias, self.norm(y_BTD)


class Aside(Model):
    """Blocks have one input, which is handed to all of them beside what they make."""

    def hidden(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        first_BTD, total = x_BTD, torch.zeros(())
        for block in self.blocks:
            y_BTD, aux = block((x_BTD + first_BTD) / 2)
            x_BTD, total = x_BTD + y_BTD.tanh(), total + aux
        return x_BTD + first_BTD, total


class Frozen(Model):
    """The first experts get what has no gradient, and no score has one there."""

    def __init__(self, *blocks: type[nn.Module]) -> None:
        super().__init__(*blocks)
        first = self.blocks[0]
        for frozen in (self.embedding, first.attention, first.attention_norm, first.norm):
            frozen.requires_grad_(False)
        first.moe.router.requires_grad_(False)


class ExpertsAlone(Model):
    def __init__(self, *blocks: type[nn.Module]) -> None:
        super().__init__(*blocks)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("experts" in name)


class Ignoring(Model):
    """The loss does not depend on the last block."""

    def hidden(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        *others, last = self.blocks
        for block in others:
            x_BTD, aux = block(x_BTD)
        last(x_BTD)
        return x_BTD, aux


# Pieces in turns.

Threads = Sequence[ThreadPoolExecutor]
"""Of each piece."""


@contextmanager
def cut(model: Model, here: Here) -> Iterator[None]:
    """The model as it is under the strategy: blocks cut the graph, experts ask."""
    forwards = {block: block.forward for block in model.cut}
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    for layer, own in enumerate(experts):
        own.layer, own.here = layer, here
    for block in forwards:
        stripe_model.cut_at(block, here)
    try:
        yield
    finally:
        for own in experts:
            own.here = Here()
        for block, forward in forwards.items():
            block.forward = forward


class Computed(NamedTuple):
    """What the experts of a layer made of a piece's rows."""

    rows_ND: Tensor
    answer: Answer
    weights: tuple[Tensor, ...]


class Local:
    """The experts of all layers, in this process."""

    def __init__(self, model: Model, add: Callable[[Tensor, Tensor], None] | None) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, Experts)]
        self.add = add
        self._function = FeedForwardExperts(silu_gated)
        self._placement = Placement.block(EXPERTS, 1)

    def forward(self, question: Question) -> Computed:
        own = self.layers[question.layer]
        route = one_rank_route(question.expert_TK, self._placement).on(STRIPE)
        with torch.set_grad_enabled(self.add is not None):
            weights = (own.up_EFD, own.down_EDF)
            slots = [weight[e] for e in range(EXPERTS) for weight in weights]
            rows_ND = question.x_TD[route.token_N].requires_grad_(self.add is not None)
            answer = Answer(self._function(rows_ND, route.slots, tuple(slots)), route)
        return Computed(rows_ND, answer, weights)

    def backward(self, computed: Computed, grad_ND: Tensor) -> Tensor:
        rows_ND, (returned_ND, route), weights = computed
        wanted = [rows_ND, *(weight for weight in weights if weight.requires_grad)]
        grad_rows_ND, *grads = torch.autograd.grad(returned_ND, wanted, grad_ND)
        assert self.add is not None
        for weight, grad in zip(wanted[1:], grads):
            self.add(weight, grad)
        return route.sum_by_token(grad_rows_ND)


def step(
    model: Model,
    batches: Sequence[Tensor],
    seeds: Sequence[float],
    add: Callable[[Tensor, Tensor], None] | None,
    threads: Threads,
) -> list[Tensor]:
    """The losses of pieces in the order of Theorem 1; ``add`` gets the gradients."""
    here, local = Here(), Local(model, add)
    pieces = [
        StripePass(partial(model, batch), add, own, here) for batch, own in zip(batches, threads)
    ]
    with cut(model, here):
        try:
            return _in_turns(pieces, local, seeds)
        finally:
            for piece in pieces:
                piece.abandon()


def _in_turns(pieces: Sequence[StripePass], local: Local, seeds: Sequence[float]) -> list[Tensor]:
    computed: list[list[Computed]] = []
    for layer in range(len(local.layers)):
        before = computed[-1] if computed else None
        answers = [None if before is None else before[j].answer for j in range(len(pieces))]
        asked = [piece.forward(answer) for piece, answer in zip(pieces, answers)]
        assert [question.layer for question in asked] == [layer] * len(pieces)
        computed.append([local.forward(question) for question in asked])
    grads = []
    for piece, last, seed in zip(pieces, computed[-1], seeds):
        assert piece.forward(last.answer) is None
        if local.add is not None:
            grads.append(piece.turn_around(seed))
    for layer in reversed(range(len(computed) if grads else 0)):
        grads_TD = [local.backward(*pair) for pair in zip(computed[layer], grads)]
        grads = [piece.backward(layer, (grad, None)) for piece, grad in zip(pieces, grads_TD)]
    return [piece.output.loss for piece in pieces]


@pytest.fixture
def threads() -> Iterator[Threads]:
    with ThreadPoolExecutor(8) as executor:
        yield [executor] * 8


# Beside plain autograd.


def built(build: Callable[[], Model], dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(3)
    return build().to(dtype)


def batches_of(num_pieces: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, VOCABULARY, (2 + j % 2, LENGTH), generator=generator)
        for j in range(num_pieces)
    ]


def seeds_of(num_pieces: int) -> list[float]:
    return [0.5 + j for j in range(num_pieces)]


Grads = dict[str, Tensor]


def plain(model: Model, batches: Sequence[Tensor]) -> tuple[list[Tensor], Grads]:
    """Losses and gradients of their weighted sum."""
    losses = [model(batch).loss for batch in batches]
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = sum(seed * loss for seed, loss in zip(seeds_of(len(batches)), losses))
    grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return losses, {name: grad for name, grad in zip(named, grads) if grad is not None}


def in_turns(
    model: Model, batches: Sequence[Tensor], threads: Threads, seeds: Sequence[float] = ()
) -> tuple[list[Tensor], Grads]:
    """The same, piece by piece."""
    sums = GradientSums()
    losses = step(model, batches, seeds or seeds_of(len(batches)), sums.add, threads)
    one = torch.ones(())
    taken = {name: sums.take(p, one) for name, p in model.named_parameters()}
    return losses, {name: grad for name, grad in taken.items() if grad is not None}


def worst(ours: Grads, theirs: Grads) -> float:
    """Largest error of a gradient, over the largest of the parameter's; none is zero."""
    nothing = torch.zeros(())
    pairs = ((ours.get(name, nothing), theirs.get(name, nothing)) for name in {*ours, *theirs})
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in pairs)


def check(model: Model, threads: ThreadPoolExecutor, num_pieces: int = 2) -> None:
    batches = batches_of(num_pieces)
    expected_losses, expected = plain(model, batches)
    losses, found = in_turns(model, batches, threads)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-13, atol=0.0)
    assert worst(found, expected) < 1e-12


MODELS: dict[str, Callable[[], Model]] = {
    "residuals": partial(Model, Block, Block, Block),
    "no auxiliary loss": partial(Model, NoAux, NoAux),
    "shared experts behind the experts": partial(Model, SharedAfter, SharedAfter),
    "a norm behind the experts": partial(Model, PostNorm, PostNorm),
    "one layer": partial(Model, Block),
    "no list of modules": WithoutList,
    "dense blocks between": partial(Model, Dense, Block, Dense, Dense, Block, Dense),
    "tied embeddings": partial(Tied, Block, Dense, Block),
    "router logits by hooks": partial(Captured, NoAux, NoAux, NoAux),
    "a weight handed through": Biased,
    "an input of all blocks": partial(Aside, Block, Block, Block),
    "frozen below": partial(Frozen, Block, Block),
    "experts alone": partial(ExpertsAlone, Block, Block),
    "the last block ignored": partial(Ignoring, Block, Block),
}


@pytest.mark.parametrize("num_pieces", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_autograd(name: str, num_pieces: int, threads: Threads) -> None:
    """G11, and models that are cut otherwise."""
    check(built(MODELS[name]), threads, num_pieces)


def test_attention_runs_backward_once_a_layer_and_piece(threads: Threads) -> None:
    """Invariant 2: Lm R times, whatever the block has behind its experts."""
    model = built(partial(Model, Block, SharedAfter, PostNorm))
    runs: Counter[nn.Module] = Counter()
    for block in model.cut:
        block.attention.register_full_backward_hook(lambda module, *_: runs.update([module]))
    in_turns(model, batches_of(4), threads)
    assert runs == {block.attention: 4 for block in model.cut}


@pytest.mark.parametrize("kept", ["remote", "local"])
def test_both_branches_are_needed(kept: str, threads: Threads) -> None:
    """What came back is added to what residual, scores and balance left; either alone is wrong."""
    through = StripePass._through

    def one_branch(stripe_pass: StripePass, roots: Sequence[Any], first: int) -> None:
        of_experts = {block.x.node for block in stripe_pass._blocks if block.x is not None}
        is_block = any(edge.node in of_experts for edge, _ in roots)
        if is_block:
            wanted = kept == "remote"
            roots = [root for root in roots if (root[0].node in of_experts) == wanted]
        through(stripe_pass, roots, first)

    model = built(partial(Model, Block, Block, Block))
    expected = plain(model, batches_of(2))[1]
    with mock.patch.object(StripePass, "_through", one_branch):
        found = in_turns(model, batches_of(2), threads)[1]
    assert worst(found, expected) > 1e-3


def test_forward_alone(threads: Threads) -> None:
    model = built(MODELS["shared experts behind the experts"])
    batches = batches_of(2)
    with torch.no_grad():
        losses = step(model, batches, seeds_of(2), None, threads)
        torch.testing.assert_close(losses, [model(batch).loss for batch in batches])
    assert not any(loss.requires_grad for loss in losses)


def test_nothing_is_kept_in_a_cycle(threads: Threads) -> None:
    """What the model was called with is free as a step ends: workers of a data loader, of which it
    may hold the iterator, must end before Python exits."""
    model, batches = built(MODELS["residuals"]), batches_of(2)
    left = list(map(ref, batches))
    gc.collect()
    gc.disable()
    try:
        step(model, batches, seeds_of(2), GradientSums().add, threads)
        threads[0].shutdown()  # and its frames are gone
        batches.clear()
        assert [batch() for batch in left] == [None, None]
    finally:
        gc.enable()


def test_blocks_that_write_over_what_they_are_given(threads: Threads) -> None:
    check(built(partial(Model, InPlace, InPlace)), threads)


# Activation checkpointing and random numbers.


def checkpointed(model: Model, where: str, use_reentrant: bool = False) -> Model:
    """Blocks are computed again in backward: wrapped by the user before the graph is cut around
    them, as in a user's model, or called by Hugging Face's layers, inside of which it is cut."""
    for block in model.cut:
        if where == "inside the cut":
            block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)
        else:
            call = type(block).__call__
            kind = type(type(block).__name__, (type(block),), {})
            block.__class__ = kind
            kind.__call__ = lambda self, *given, call=call: checkpoint(
                partial(call, self), *given, use_reentrant=use_reentrant
            )
    return model


WHERE = ("inside the cut", "around the cut")


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", [Block, SharedAfter, PostNorm])
def test_activation_checkpointing(kind: type[Block], where: str, threads: Threads) -> None:
    """A block is computed again once for each piece, with the same random numbers."""
    model = checkpointed(built(partial(Model, kind, kind)), where)
    attentions = [block.attention for block in model.cut]
    expected = plain(model, batches_of(3))[1]
    for attention in attentions:
        attention.forwards = 0
    found = in_turns(model, batches_of(3), threads)[1]
    assert worst(found, expected) < 1e-12
    # What keeps tensors behind the experts is gone through twice, and computed again for both.
    assert [a.forwards for a in attentions] == [6 if kind is Block else 9] * 2


@pytest.mark.parametrize("where", [None, *WHERE])
def test_dropout(where: str | None, threads: Threads) -> None:
    """What is computed again draws as it did the first time, though others drew in between."""
    model = built(partial(Model, Dropping, Dropping))
    if where is not None:
        checkpointed(model, where)
    batches = batches_of(2)
    found = in_turns(model, batches, threads)[1]
    for block in model.cut:
        block.draws = False
        for first, *again in block.masks.values():
            assert len(again) == (0 if where is None else 2)
            assert all(torch.equal(mask, first) for mask in again)
    assert worst(found, plain(model, batches)[1]) < 1e-12


def test_reentrant_checkpointing_is_refused(threads: Threads) -> None:
    model = checkpointed(built(MODELS["residuals"]), "inside the cut", use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        in_turns(model, batches_of(2), threads)
    threads[0].shutdown()  # waits for all of them


# Types, and what torch keeps beside the graph.


def _many_nodes() -> None:
    x = torch.zeros((), requires_grad=True)
    for _ in range(10_000):
        x.view(())


@pytest.mark.parametrize("is_inside", [False, True])
def test_autocast(is_inside: bool) -> None:
    """Casts of weights, which autocast keeps for all threads, are nodes of one piece: no other may
    read them. Nodes are numbered by thread."""
    model = built(MODELS["shared experts behind the experts"], torch.float32)
    forward = model.forward
    if is_inside:
        model.forward = torch.autocast("cpu", torch.bfloat16)(forward)
    batches = [batches_of(1)[0]] * 2
    with ThreadPoolExecutor(1) as low, ThreadPoolExecutor(1) as high:
        high.submit(_many_nodes).result()
        with nullcontext() if is_inside else torch.autocast("cpu", torch.bfloat16):
            in_order = in_turns(model, batches, [low, high])[1]
            first, second = (in_turns(model, batches[:1], [low], [seed])[1] for seed in seeds_of(2))
    model.forward = forward
    expected = {name: first[name] + second[name] for name in first}
    assert worst(in_order, expected) < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        rough = plain(model, batches)[1]
    for name in rough:
        assert (in_order[name] - rough[name]).norm() < 0.1 * rough[name].norm()


def test_hooks_of_parameters_run_once(threads: Threads) -> None:
    """A hook sees a gradient when it is handed over, not also when it is found."""
    model = built(MODELS["residuals"])
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            parameter.register_hook(lambda grad, name=name: seen.append(name))
    in_turns(model, batches_of(2), threads)
    assert seen == []


# What goes wrong.


def failing_step(model: Model, threads: Threads) -> None:
    step(model, batches_of(2), seeds_of(2), GradientSums().add, threads)


def test_an_error_of_the_model_reaches_the_caller(threads: Threads) -> None:
    """And whatever has paused ends."""
    model = built(MODELS["residuals"])
    second = model.blocks[1].attention
    ended: list[str] = []
    hidden = model.hidden

    def reported(x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return hidden(x_BTD)
        finally:
            ended.append(threading.current_thread().name)

    model.hidden = reported
    second.register_forward_hook(partial(_fails, []))
    with pytest.raises(KeyError, match="of the user"):
        failing_step(model, threads)
    threads[0].shutdown()  # waits for all of them
    assert len(ended) == 2


def _fails(calls: list[None], *_: Any) -> None:
    calls.append(None)
    if len(calls) == 2:
        raise KeyError("of the user")
