"""The collectives, on gloo ranks: every member gives other sizes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ds_moe_ext import comm
from tests.ranks import pool_of

SENT = [[2, 0, 3], [1, 4, 0], [0, 0, 0]]  # rows from each rank to each; rank 2 sends nothing


def _exchange(rank: int, world_size: int, name: str) -> list[int]:
    exchange = {
        "rows": comm.all_to_all_rows,
        "pairs": comm.all_to_all_by_pairs,
    }[name]
    received = [row[rank] for row in SENT]
    # A row says where it comes from, where it goes and which of its kind it is: 012 is from rank 0
    # to rank 1, the third.
    sent = [100 * rank + 10 * to + n for to, count in enumerate(SENT[rank]) for n in range(count)]
    rows = torch.tensor(sent, dtype=torch.float64)[:, None].expand(-1, 3)
    arrived = exchange(rows, SENT[rank], received, dist.group.WORLD)
    assert arrived.shape == (sum(received), 3)
    return arrived[:, 0].int().tolist()


@pytest.mark.parametrize("name", ["rows", "pairs"])
def test_rows_arrive_in_the_order_of_their_senders(name: str) -> None:
    assert pool_of(3).run(_exchange, name) == [[0, 1, 100], [110, 111, 112, 113], [20, 21, 22]]


def _gather(rank: int, world_size: int) -> tuple[list[list[int]], list[int], list[str]]:
    group = dist.group.WORLD
    counts = comm.all_gather_counts(torch.tensor([[rank, 10 * rank]]), group)
    local = torch.arange(rank + 1)[:, None] + 10 * rank
    slots = comm.all_gather_slots(local, [1, 2, 3], group)
    return counts[:, 0].tolist(), slots[:, 0].tolist(), comm.gather_texts(f"rank {rank}", None)


def test_gathers() -> None:
    for counts, slots, texts in pool_of(3).run(_gather):
        assert counts == [[0, 0], [1, 10], [2, 20]]
        assert slots == [0, 10, 11, 20, 21, 22]
        assert texts == ["rank 0", "rank 1", "rank 2"]
