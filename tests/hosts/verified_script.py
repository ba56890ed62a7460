# SPDX-License-Identifier: Apache-2.0
"""A user's own training script in plain PyTorch, for ``ds-moe-ext verify``: nothing is seeded.

Called with a JSON file, and with ``wrong`` where the experts shall be described wrongly."""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ds_moe_ext
from tests.hosts import toy
from tests.hosts.verified import wrong_experts

NUM_STEPS = 8


def main(config: str, *how: str) -> None:
    dist.init_process_group("gloo")
    with wrong_experts() if how else contextlib.nullcontext():
        train(config)
    dist.destroy_process_group()


def train(config: str) -> None:
    model = toy.build("toy")
    moe = ds_moe_ext.attach(model, config)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    moe.watch(optimizer)
    for _ in range(NUM_STEPS):
        tokens = torch.randint(0, toy.VOCABULARY, (2, toy.LENGTH))
        wrapped(input_ids=tokens, labels=tokens.roll(-1, 1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
