# SPDX-License-Identifier: Apache-2.0
"""Batches of a ZP group on its attention ranks, and their losses back where they are of.

Shape letters: B samples of a rank's batch, L their length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core.layout import Roles
from ds_moe_ext.hosts.zebra.batches import BatchExchange, Outcome, Shared
from ds_moe_ext.schedule.stripes import Samples
from tests.hosts.families import build
from tests.ranks import pool_of

SIZES, LENGTHS = (3, 5, 2, 4), (6, 4, 7, 5)
FIRST = Roles.first(2, 2)
IN_TURNS = Roles((0, 2), (1, 3))


def exchange_of(rank: int, world_size: int, roles: Roles, num_stripes: int) -> BatchExchange:
    group, control = (dist.new_group(range(world_size), backend="gloo") for _ in range(2))
    return BatchExchange(
        group,
        control,
        place=rank,
        roles=roles,
        num_stripes=num_stripes,
        device=torch.device("cpu"),
    )


def batch_of(rank: int) -> dict[str, Any]:
    """What a rank's model is called with; any rank can make any rank's."""
    generator = torch.Generator().manual_seed(rank)
    size, length = SIZES[rank], LENGTHS[rank]
    ids_BL = torch.randint(0, 64, (size, length), generator=generator)
    return {
        "input_ids": ids_BL,
        "attention_mask": ids_BL > 9,
        "more": [{"features": torch.randn(size, length, 3, generator=generator).mT}, None],
        "scores": torch.randn(size, generator=generator, dtype=torch.bfloat16),
        "temperature": torch.tensor(0.5 + rank),
        "table": torch.full((9, 2), float(rank)),
        "return_dict": True,
        "name": "a",
    }


def cut(batch: dict[str, Any], piece: Samples) -> list[Tensor]:
    tensors = (batch["input_ids"], batch["attention_mask"], batch["more"][0]["features"])
    return [tensor[piece.start : piece.stop] for tensor in (*tensors, batch["scores"])]


# Arguments.


def _share(rank: int, world_size: int, roles: Roles, num_stripes: int) -> Shared:
    batches = exchange_of(rank, world_size, roles, num_stripes)
    own = batch_of(rank)
    ids_BL = own.pop("input_ids")
    # Names in another order on every rank, and one argument by position.
    kwargs = dict(sorted(own.items(), reverse=bool(rank % 2)))
    kwargs["scores"].requires_grad_()
    with torch.no_grad():
        shared = batches.share((ids_BL,), kwargs, "eval")
    for stripe in shared.calls:
        for call in stripe:
            assert set(call.kwargs) == set(kwargs)
            theirs = batch_of(call.piece.sender)
            assert torch.equal(call.kwargs["temperature"], theirs["temperature"])
            assert torch.equal(call.kwargs["table"], theirs["table"])
            assert (call.kwargs["return_dict"], call.kwargs["name"]) == (True, "a")
            assert call.kwargs["more"][1] is None
            found = cut({"input_ids": call.args[0], **call.kwargs}, Samples(0, 0, 9))
            for tensor, expected in zip(found, cut(theirs, call.piece)):
                assert tensor.dtype == expected.dtype
                assert torch.equal(tensor, expected)
    return shared


@pytest.mark.parametrize("roles", [FIRST, IN_TURNS], ids=["first", "in_turns"])
@pytest.mark.parametrize("num_stripes", [1, 2, 5])
def test_ragged_batches(roles: Roles, num_stripes: int) -> None:
    every = pool_of(4).run(_share, roles, num_stripes)
    for rank, shared in enumerate(every):
        assert shared.num_samples_C == SIZES
        assert shared.pieces == every[0].pieces
        run = tuple(tuple(call.piece for call in stripe) for stripe in shared.calls)
        if rank in roles.attention_ep_ranks:
            assert run == shared.pieces[roles.attention_ep_ranks.index(rank)]
            weights = [
                (call.weight, call.piece.num_samples / SIZES[call.piece.sender])
                for stripe in shared.calls
                for call in stripe
            ]
            assert all(weight == share for weight, share in weights)
        else:
            assert run == ((),) * num_stripes
    samples = [
        (piece.sender, sample)
        for stripes in every[0].pieces
        for stripe in stripes
        for piece in stripe
        for sample in range(piece.start, piece.stop)
    ]
    assert sorted(samples) == [(rank, i) for rank, size in enumerate(SIZES) for i in range(size)]


@pytest.mark.parametrize("roles", [FIRST, IN_TURNS], ids=["first", "in_turns"])
def test_only_adopted_samples_travel(roles: Roles) -> None:
    """Both attention ranks keep their batches, of 3 and 5 or 2 samples, and 7 samples are each's
    share; a sample takes 8 + 1 + 12 bytes for each token and 2 more, and to each that adopts some
    go 4 + 72 of what is not cut."""
    every = pool_of(4).run(_share, roles, 1)
    for rank, shared in enumerate(every):
        adopters = [
            stripes for stripes in shared.pieces if rank in {p.sender for s in stripes for p in s}
        ]
        sent = SIZES[rank] * (21 * LENGTHS[rank] + 2) + 76 * len(adopters)
        assert shared.traffic.sent_bytes == (0 if rank in roles.attention_ep_ranks else sent)
        assert (shared.traffic.received_bytes > 0) == (rank in roles.attention_ep_ranks)
    sent, received = (
        sum(getattr(shared.traffic, way) for shared in every)
        for way in ("sent_bytes", "received_bytes")
    )
    assert sent == received


def _share_what_an_attention_rank_has_too_much_of(rank: int, world_size: int) -> list[list[int]]:
    batches = exchange_of(rank, world_size, Roles.first(2, 1), 2)
    start, size = ((0, 6), (100, 1), (200, 1))[rank]
    shared = batches.share((torch.arange(start, start + size),), {}, "train")
    return [[i for call in stripe for i in call.args[0].tolist()] for stripe in shared.calls]


def test_batches_of_attention_ranks_are_adopted_too() -> None:
    every = pool_of(3).run(_share_what_an_attention_rank_has_too_much_of)
    assert every == [[[0, 1], [2, 3]], [[100, 4], [5, 200]], [[], []]]


# Refusals.


def _refused(rank: int, world_size: int, change: Callable[[dict[str, Any]], Any]) -> str:
    """What every rank is notified where the last one's call is not like the others'."""
    batches = exchange_of(rank, world_size, Roles.first(1, 2), 2)
    own = batch_of(rank)
    mode = (change(own) if rank == world_size - 1 else None) or "train"
    with pytest.raises(ValueError) as caught:
        batches.share((), own, mode)
    return str(caught.value)


def _eval(own: dict[str, Any]) -> str:
    return "eval"


def _without_scores(own: dict[str, Any]) -> None:
    del own["scores"]


def _narrow_ids(own: dict[str, Any]) -> None:
    own["input_ids"] = own["input_ids"].int()


def _wide_table(own: dict[str, Any]) -> None:
    own["table"] = torch.zeros(9, 3)


def _plain_value(own: dict[str, Any]) -> None:
    own["return_dict"] = False


def _no_tensor(own: dict[str, Any]) -> None:
    own.clear()


def _object(own: dict[str, Any]) -> None:
    own["name"] = object()


def _gradient(own: dict[str, Any]) -> None:
    own["more"][0]["features"].requires_grad_()


def _one_sample(own: dict[str, Any]) -> None:
    own["scores"] = own["scores"][:1]


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (_eval, "the mode is 'train' at place 0 and 'eval' at place 2"),
        (
            _without_scores,
            "['scores'] is torch.bfloat16 tensor of 1 dims on cpu, [3] at place 0 and",
        ),
        (_narrow_ids, "torch.int64 tensor of 2 dims on cpu, [3, 6] at place 0 and torch.int32"),
        (_wide_table, "['table'] is torch.float32 tensor of 2 dims on cpu, [9, 2] at place 0 and"),
        (_plain_value, "['return_dict'] is True at place 0 and False at place 2"),
        (_no_tensor, "place 2: no argument is a tensor with a dim for samples"),
        (_object, "place 2: ['name'] is a object, which cannot be cut"),
        (_gradient, "place 2: ['more'][0]['features'] requires a gradient"),
        (_one_sample, "['scores'] is torch.bfloat16 tensor of 1 dims on cpu, [3] at place 0 and"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_unlike_calls_are_refused_on_every_rank(
    change: Callable[[dict[str, Any]], Any], reported: str
) -> None:
    messages = pool_of(3).run(_refused, change)
    assert len(set(messages)) == 1
    assert reported in messages[0]


def _few_samples(rank: int, world_size: int) -> Shared:
    batches = exchange_of(rank, world_size, Roles.first(1, 1), 99)
    return batches.share((), batch_of(rank), "train")


def test_a_batch_with_fewer_samples_than_stripes() -> None:
    """As the last one of an epoch may have; a step has a stripe for each sample then."""
    here, there = pool_of(2).run(_few_samples)
    assert [[piece.num_samples for piece in stripe] for stripe in here.pieces[0]] == [[1]] * sum(
        here.num_samples_C
    )
    assert len(here.calls) == len(there.calls) == sum(here.num_samples_C)


# Outputs.


class Pair(NamedTuple):
    logits: Tensor
    loss: Tensor
    extra: tuple[Tensor, ...]


@dataclass(frozen=True)
class Record:
    language_loss: Tensor
    logits: Tensor
    parts: dict[str, Tensor]
    name: str = "record"


def tensor_output(loss: Tensor, other: Tensor, logits: Tensor) -> Any:
    return loss


def tuple_output(loss: Tensor, other: Tensor, logits: Tensor) -> Any:
    return loss, logits, other


def pair_output(loss: Tensor, other: Tensor, logits: Tensor) -> Any:
    return Pair(logits, loss, (other, logits))


def dict_output(loss: Tensor, other: Tensor, logits: Tensor) -> Any:
    return {"other": other, "loss": loss, "logits": logits, "hidden": (logits, logits), "on": True}


def record_output(loss: Tensor, other: Tensor, logits: Tensor) -> Any:
    return Record(loss, logits, {"other": other, "count": torch.tensor(3)})


def hf_output(loss: Tensor, other: Tensor, logits: Tensor) -> Any:
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    return MoeCausalLMOutputWithPast(
        loss=loss, aux_loss=other, logits=logits, router_logits=(logits, logits)
    )


OUTPUTS = (tensor_output, tuple_output, pair_output, dict_output, record_output, hf_output)


def losses_of(ids_BL: Tensor, parameter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values_B = ids_BL.sum(dim=1) * parameter
    return values_B.mean(), values_B.detach().square().mean().float(), values_B


def _round_trip(rank: int, world_size: int, make: Callable[..., Any]) -> Any:
    batches = exchange_of(rank, world_size, FIRST, 2)
    parameter = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    own = batch_of(rank)
    shared = batches.share((), own, "train")
    outcomes = [
        [Outcome.of(make(*losses_of(call.kwargs["input_ids"], parameter))) for call in stripe]
        for stripe in shared.calls
    ]
    assert all(outcome.loss.requires_grad for stripe in outcomes for outcome in stripe)
    returned = batches.return_scalars(shared, outcomes)
    loss, other, _ = losses_of(own["input_ids"], parameter)
    torch.testing.assert_close(returned.loss, loss.detach(), rtol=1e-12, atol=0)
    assert not returned.loss.requires_grad
    output = returned.output(loss)
    expected = make(loss, other, None)
    assert type(output) is type(expected)
    assert Outcome.of(output).loss is loss
    return output


@pytest.mark.parametrize("make", OUTPUTS, ids=lambda make: make.__name__)
def test_every_rank_gets_its_own_losses_in_the_users_type(make: Callable[..., Any]) -> None:
    pool_of(4).run(_round_trip_checked, make)


def _round_trip_checked(rank: int, world_size: int, make: Callable[..., Any]) -> None:
    output = _round_trip(rank, world_size, make)
    _, other, _ = losses_of(batch_of(rank)["input_ids"], torch.tensor(0.25, dtype=torch.float64))
    match output:
        case Tensor():
            return
        case Pair(logits, _, (got, nothing)):
            assert logits is None and nothing is None
        case (_, None, got):
            pass
        case {"hidden": None, "logits": None, "on": True, "other": got}:
            assert list(output) == ["other", "loss", "logits", "hidden", "on"]
        case Record(_, None, {"other": got, "count": None}, "record"):
            pass
        case _:
            got = output.aux_loss
            assert output.logits is None and output.router_logits is None
            assert list(output.keys()) == ["loss", "aux_loss"]
    torch.testing.assert_close(got, other)


def _changes(rank: int, world_size: int) -> list[str]:
    """Outputs change their type between steps, and the expert rank is notified."""
    batches = exchange_of(rank, world_size, Roles.first(1, 1), 2)
    kinds = []
    for make in (dict_output, dict_output, tensor_output, dict_output):
        shared = batches.share((), batch_of(rank), "train")
        parameter = torch.ones((), requires_grad=True)
        outcomes = [
            [Outcome.of(make(*losses_of(call.kwargs["input_ids"], parameter))) for call in stripe]
            for stripe in shared.calls
        ]
        returned = batches.return_scalars(shared, outcomes)
        kinds.append(type(returned.output(returned.loss)).__name__)
    return kinds


def test_outputs_may_change_between_steps() -> None:
    assert pool_of(2).run(_changes) == [["dict", "dict", "Tensor", "dict"]] * 2


def _unlike(rank: int, world_size: int) -> str:
    """The second attention rank leaves a field out."""
    batches = exchange_of(rank, world_size, Roles.first(2, 1), 1)
    shared = batches.share((), batch_of(rank), "train")
    loss = torch.ones((), requires_grad=True)
    output = {"loss": loss} if rank == 1 else {"loss": loss, "other": torch.zeros(())}
    outcomes = [[Outcome.of(output) for _ in stripe] for stripe in shared.calls]
    with pytest.raises(ValueError) as caught:
        batches.return_scalars(shared, outcomes)
    return str(caught.value)


def test_unlike_outputs_are_refused_on_every_rank() -> None:
    messages = pool_of(3).run(_unlike)
    assert len(set(messages)) == 1
    assert "place 1: dict(loss: torch.float32 with a gradient); let it" in messages[0]


def _piece_by_piece(rank: int, world_size: int) -> str:
    """A number of Python's differs from piece to piece."""
    batches = exchange_of(rank, world_size, Roles.first(1, 1), 2)
    shared = batches.share((), batch_of(rank), "train")
    loss = torch.ones((), requires_grad=True)
    outcomes = [
        [Outcome.of({"loss": loss, "at": call.piece.start}) for call in stripe]
        for stripe in shared.calls
    ]
    with pytest.raises(ValueError) as caught:
        batches.return_scalars(shared, outcomes)
    return str(caught.value)


def test_unlike_pieces_are_refused_on_every_rank() -> None:
    messages = pool_of(2).run(_piece_by_piece)
    assert len(set(messages)) == 1
    assert "at: 0" in messages[0] and "numbers as 0-dim tensors" in messages[0]


def _local_class(rank: int, world_size: int) -> str:
    @dataclass
    class Local:
        loss: Tensor

    batches = exchange_of(rank, world_size, Roles.first(1, 1), 2)
    shared = batches.share((), batch_of(rank), "train")
    outcomes = [[Outcome.of(Local(torch.ones(()))) for _ in stripe] for stripe in shared.calls]
    with pytest.raises(ValueError) as caught:
        batches.return_scalars(shared, outcomes)
    return str(caught.value)


def test_a_type_that_cannot_be_sent_is_refused_on_every_rank() -> None:
    for message in pool_of(2).run(_local_class):
        assert "Local" in message and "at the top of a module" in message


def test_which_scalar_is_the_loss() -> None:
    learns, fixed = torch.ones((), requires_grad=True), torch.zeros(())
    assert Outcome.of({"a": fixed, "b": learns, "loss": learns + 1}).template.loss == 2
    assert Outcome.of({"a": fixed, "b": learns}).template.loss == 1
    assert Outcome.of({"loss": fixed, "b": learns}).template.loss == 1
    assert Outcome.of((torch.zeros(3), fixed, fixed)).template.loss == 0
    assert Outcome.of({"a": fixed, "loss": fixed}).template.loss == 1


@pytest.mark.parametrize(
    "output",
    [
        torch.zeros(3, requires_grad=True),
        {"logits": torch.zeros(3, requires_grad=True), "other": torch.zeros(())},
        (torch.tensor(3), None),
        None,
    ],
    ids=["logits", "a scalar that does not learn", "an integer", "nothing"],
)
def test_an_output_without_a_loss(output: Any) -> None:
    with pytest.raises(ValueError, match=r"without a loss.* compute its loss .*labels="):
        Outcome.of(output)


# A model of Hugging Face's.


def _mixtral(rank: int, world_size: int, is_divided: bool) -> None:
    """Where the caller says what a sum is divided by, samples may have unlike numbers of labels."""
    model = build("mixtral")
    model.config.output_router_logits = False  # a piece's balance is not a part of its batch's
    batch = batch_of(rank)
    ids_BL = batch["input_ids"]
    kwargs = {"input_ids": ids_BL, "labels": ids_BL}
    if is_divided:
        kwargs["labels"] = ids_BL.where(batch["attention_mask"], -100)
        kwargs["num_items_in_batch"] = torch.tensor(50)
    batches = exchange_of(rank, world_size, FIRST, 3)
    shared = batches.share((), kwargs, "train")
    outcomes = [
        [Outcome.of(model(*call.args, **call.kwargs)) for call in stripe] for stripe in shared.calls
    ]
    returned = batches.return_scalars(shared, outcomes)
    expected = model(**kwargs)
    torch.testing.assert_close(returned.loss, expected.loss.detach(), rtol=1e-6, atol=0)
    output = returned.output(expected.loss)
    assert type(output) is type(expected)
    assert output.loss is expected.loss
    assert output.logits is None


@pytest.mark.parametrize("is_divided", [False, True], ids=["mean", "num_items_in_batch"])
def test_mixtral(is_divided: bool) -> None:
    pool_of(4).run(_mixtral, is_divided)
