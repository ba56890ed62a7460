# SPDX-License-Identifier: Apache-2.0
"""A cluster is known by its device's name, if all ranks have it: what is chosen then, and
reported."""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from io import StringIO
from unittest import mock

import torch

import ds_moe_ext
from ds_moe_ext.hosts.attachment import startup_check
from tests.hosts import jobs, toy
from tests.ranks import pool_of

GPU = "NVIDIA H100 80GB HBM3"


def reported(rank: int, world_size: int, devices: tuple[str, ...], under_deepspeed: bool) -> str:
    """What a start prints where ranks have devices of these names, on nodes of two ranks."""
    on_nodes = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2")
    named = mock.patch.object(startup_check, "device_name", lambda device: devices[rank])
    with on_nodes, named, redirect_stdout(StringIO()) as printed:
        if under_deepspeed:
            import deepspeed

            job = jobs.Job("toy", strategy="fssdp")
            model, document = jobs.model_of(job), jobs.document_of(job, world_size)
            document["ds_moe_ext"]["report"] = {"enabled": True}
            document["ds_moe_ext"].pop("expert_parallel_size", None)
            deepspeed.initialize(
                model=model, model_parameters=list(model.parameters()), config=document
            )
        else:
            torch.manual_seed(0)
            ds_moe_ext.attach(toy.Toy(toy.Shape((8,))), {"enabled": True, "strategy": "fssdp"})
    return printed.getvalue()


RULE = (
    "expert_parallel_size is null: 2 EP ranks, so that tokens and replicas stay in a node of "
    "2 ranks"
)
REMEDY = "; ds-moe-ext profile measures your cluster, and ds_moe_ext.hardware names the file"


def test_ranks_with_one_known_device_choose_by_its_file() -> None:
    for under_deepspeed in (False, True):
        first, *others = pool_of(4).run(reported, (GPU,) * 4, under_deepspeed)
        assert ", by the predicted cost of a layer on DGX H100, 4 nodes: it takes " in first
        assert (
            "; the cluster is priced as configs/hardware/dgx_h100.json with 2 ranks per node, "
            f"by its device name ({GPU}){REMEDY}"
        ) in first
        assert not any("ds_moe_ext" in other for other in others)


def test_ranks_with_unlike_or_unknown_devices_choose_by_the_rule() -> None:
    """Whichever rank is another: what the first has is not what counts."""
    for devices in ((GPU, GPU, GPU, "NVIDIA L40S"), ("NVIDIA L40S", GPU, GPU, GPU)):
        first, *_ = pool_of(4).run(reported, devices, False)
        assert RULE in first
        unlike = "; sizes were not priced, because ranks have different devices ("
        assert unlike in first and REMEDY in first
        assert repr(GPU) in first and "'NVIDIA L40S'" in first
    for under_deepspeed in (False, True):
        first, *_ = pool_of(4).run(reported, ("x86_64",) * 4, under_deepspeed)
        assert RULE in first
        unknown = (
            "; sizes were not priced, because no shipped hardware file describes device 'x86_64'"
        )
        assert f"{unknown}{REMEDY}" in first
