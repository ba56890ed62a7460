# SPDX-License-Identifier: Apache-2.0
"""Stock Megatron, in processes of its own: loads checkpoints, says what it computes, saves them.

``megatron_side.py '{"cases": [[LOAD, SAVE], ...], "tokens": [...], "tp": 1, "ep": 1}'`` in every
rank, whose environment says which it is. Logits go to ``SAVE/logits.pt``.
"""

from __future__ import annotations

import json
import queue
import sys
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).parents[2]


def main(asked: dict[str, Any]) -> None:
    """Do all cases."""
    import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=asked["tp"],
        expert_model_parallel_size=asked["ep"],
        expert_tensor_parallel_size=1 if asked["ep"] > 1 else asked["tp"],
    )
    model_parallel_cuda_manual_seed(1)
    for load, save in asked["cases"]:
        run(Path(load), Path(save), torch.tensor(asked["tokens"]))
    dist.barrier()
    dist.destroy_process_group()


def run(load: Path, save: Path, tokens: Tensor) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # not a server's, which takes seconds to start

    common = torch.load(load / "common.pt", weights_only=False)
    model = built(common["args"])
    metadata = dict(dist_checkpointing.load_content_metadata(str(load)))
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    wanted = {"model": model.sharded_state_dict(metadata=metadata)}
    state = dist_checkpointing.load(wanted, str(load))["model"]
    model.load_state_dict(state, strict=True)
    model.eval()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(tokens.shape[1], tokens.shape[1]).tril().logical_not()[None, None]
    with torch.no_grad():
        logits = model(tokens, positions, mask)
    iteration = save / "iter_0000007"
    if dist.get_rank() == 0:
        iteration.mkdir(parents=True)
        torch.save(logits, save / "logits.pt")
        (save / "latest_checkpointed_iteration.txt").write_text("7")
    dist.barrier()
    saved = {"model": model.sharded_state_dict(metadata=metadata), "args": common["args"]}
    about = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
    dist_checkpointing.save(saved, str(iteration), content_metadata=about)


def built(args: Namespace) -> Any:
    """What pretrain_gpt.py builds of these arguments, with ``--transformer-impl local``."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    tp = parallel_state.get_tensor_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        qk_layernorm=args.qk_layernorm,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        add_bias_linear=args.add_bias_linear,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        num_moe_experts=args.num_experts,
        moe_layer_freq=args.moe_layer_freq,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size,
        moe_router_topk=args.moe_router_topk,
        moe_router_pre_softmax=args.moe_router_pre_softmax,
        moe_token_dispatcher_type="alltoall",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=-(-args.vocab_size // 16) * 16,  # padded, as Megatron does
        max_sequence_length=args.max_position_embeddings,
        parallel_output=False,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "launch"))
    main(json.loads(sys.argv[1]))
