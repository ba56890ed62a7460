# SPDX-License-Identifier: Apache-2.0
"""Trains toys of Megatron by Transformer Engine's layers: the ranks of ``test_te_stand_in.py``.

In processes of their own, with ``te_stand_in`` on PYTHONPATH: Megatron asks when it is imported
whether Transformer Engine is there.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.hosts import megatron_toy


def layer_spec(run: megatron_toy.MegatronRun, config: Any, vp_stage: int | None) -> Any:
    """The specification of Transformer Engine's layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


def main(asked: Path) -> None:
    """Train each run of a pickled list, of a run, our settings or none and how busy experts are;
    leave what this rank has found beside the file."""
    from tests.hosts.flex_stand_in import flex
    from tests.hosts.megatron_skewed import train_skewed

    megatron_toy.layer_spec = layer_spec
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with flex():
        jobs = pickle.loads(asked.read_bytes())
        found = [train_skewed(rank, world_size, *job) for job in jobs]
    asked.with_suffix(f".{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
