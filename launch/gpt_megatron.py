# SPDX-License-Identifier: Apache-2.0
"""What pretrain_megatron.py is built of: models, its command line and checkpoints.

Models are those that files of configs/models/ describe, of the same shapes as under DeepSpeed,
built of Megatron's own modules. Flags are Megatron-LM's, and a few of ours. Checkpoints are in
Megatron's distributed form, in folders laid out as Megatron-LM lays them out: other numbers of
ranks can load them, as far as Megatron can cut the optimizer's state anew (without
`--use-distributed-optimizer` any sizes that have experts' parallelism on both sides or on neither).
Nothing in the script draws random numbers once the weights are there, so no generators are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from console import VOCABULARY_SIZE, Text, named, read_json, read_text
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from packaging.version import Version
from torch import Tensor
from torch.nn import functional as F

HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None


@dataclass(frozen=True)
class Architecture:
    """What a model file says, in Megatron's words."""

    transformer: Mapping[str, Any]  # fields of TransformerConfig
    # arguments of GPTModel that are about positions and about tied embeddings
    embeddings: Mapping[str, Any]
    max_positions: int  # the longest window


def read_architecture(arguments: argparse.Namespace) -> Architecture:
    """Read the file that `--model` names.

    Raises:
        ValueError: it is not there, or no model of Megatron's can be made of it.
    """
    path: Path = arguments.model
    file = read_json(path, "--model")
    family, config = file.get("family"), file.get("config", {})
    if family not in FAMILIES:
        raise ValueError(
            f"--model {path}: family {family!r} is not one of {', '.join(FAMILIES)}, which "
            "this script builds"
        )
    if config.get("vocab_size") != VOCABULARY_SIZE:
        raise ValueError(
            f"--model {path}: config.vocab_size {config.get('vocab_size')} is not the number of "
            f"values of a byte; set it to {VOCABULARY_SIZE}"
        )
    try:
        architecture = FAMILIES[family](config, arguments.num_layers)
    except KeyError as error:
        raise ValueError(f"--model {path}: config has no key {error}; add it") from error
    if arguments.seq_length > architecture.max_positions:
        raise ValueError(
            f"--seq-length {arguments.seq_length} is more than the {architecture.max_positions} "
            f"positions of {path}; lower it"
        )
    return architecture


def _gpt_moe(config: Mapping[str, Any], num_layers: int | None) -> Architecture:
    """GPT-2's layers; every n-th feed-forward is a mixture of experts."""
    moe, num_layers = config["moe"], num_layers or config["num_layers"]
    transformer = {
        "num_layers": num_layers,
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_heads"],
        "ffn_hidden_size": config["ffn_hidden_size"],
        "moe_ffn_hidden_size": config["ffn_hidden_size"],
        "num_moe_experts": moe["num_experts"],
        "moe_router_topk": moe["k"],
        "moe_router_pre_softmax": moe["k"] == 1,
        "moe_layer_freq": [int((i + 1) % config["moe_every"] == 0) for i in range(num_layers)],
        "moe_aux_loss_coeff": config["aux_loss_coef"],
        "moe_expert_capacity_factor": moe["capacity_factor"] if moe["drop_tokens"] else None,
    }
    embeddings = {
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": config["tie_embeddings"],
    }
    return Architecture(transformer, embeddings, config["sequence_length"])


def _mixtral(config: Mapping[str, Any], num_layers: int | None) -> Architecture:
    """Hugging Face's Mixtral: SwiGLU experts in every layer, RMSNorm, rotary positions."""
    transformer = {
        "num_layers": num_layers or config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "moe_ffn_hidden_size": config["intermediate_size"],
        "num_moe_experts": config["num_local_experts"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_aux_loss_coeff": config["router_aux_loss_coef"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-5),
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
    }
    embeddings = {
        "position_embedding_type": "rope",
        "rotary_base": config.get("rope_theta", 1_000_000),
        "share_embeddings_and_output_weights": config["tie_word_embeddings"],
    }
    return Architecture(transformer, embeddings, config["max_position_embeddings"])


FAMILIES: dict[str, Callable[[Mapping[str, Any], int | None], Architecture]] = {
    "gpt_moe": _gpt_moe,
    "mixtral": _mixtral,
}


def transformer_config(
    architecture: Architecture, arguments: argparse.Namespace
) -> TransformerConfig:
    """Complete the file by the command line: as in Megatron-LM, an argument with the name of a
    field of TransformerConfig is that field."""
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    given = {
        name: value
        for name, value in vars(arguments).items()
        if name in names and value is not None
    }
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    fixed = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "masked_softmax_fusion": HAS_TRANSFORMER_ENGINE,
    }
    return TransformerConfig(**{**architecture.transformer, **fixed, **given})


def build_chunks(config: TransformerConfig, architecture: Architecture) -> list[GPTModel]:
    """Build this rank's part of the model: one chunk, or several under an interleaved pipeline."""
    num_chunks = config.virtual_pipeline_model_parallel_size
    if num_chunks is None:
        return [_chunk(config, architecture, None)]
    return [_chunk(config, architecture, stage) for stage in range(num_chunks)]


def _chunk(config: TransformerConfig, architecture: Architecture, stage: int | None) -> GPTModel:
    place = {"ignore_virtual": False, "vp_stage": stage}
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=HAS_TRANSFORMER_ENGINE,
            normalization=config.normalization,
            vp_stage=stage,
        ),
        vocab_size=VOCABULARY_SIZE,
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        vp_stage=stage,
        **architecture.embeddings,
    )


WARMUP_FRACTION = 0.15
ABOUT = """Pre-train a mixture-of-experts language model on bytes under Megatron-core. Flags are
Megatron-LM's, and a few of ours."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=ABOUT, allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="model file, see configs/models/")
    add("--num-layers", type=int, help="replaces the number of layers of the model file")
    add("--seq-length", type=int, default=128, help="bytes in a window")
    add("--data", type=Path, help="file or folder of text; default: Python's standard library")
    add("--output", type=Path, help="folder for results; default: runs/megatron/<strategy>")
    add("--seed", type=int, default=1, help="of weights and of the order of the text")
    add("--ds-moe-ext-config", type=Path, metavar="FILE", help="with a block as configs/strategies")

    add = parser.add_argument_group("training").add_argument
    add("--micro-batch-size", type=int, default=8, help="windows in a micro-batch of a rank")
    add("--global-batch-size", type=int, help="windows in a step; default: one micro-batch a rank")
    add("--train-iters", type=int, default=200)
    add("--lr", type=float, default=2e-3)
    add("--min-lr", type=float, help="default: a tenth of --lr")
    add("--lr-warmup-iters", type=int, help=f"default: {WARMUP_FRACTION:.0%}% of --lr-decay-iters")
    add("--lr-decay-iters", type=int, help="default: --train-iters")
    add("--weight-decay", type=float, default=0.1)
    add("--clip-grad", type=float, default=1.0)
    add("--bf16", action="store_true")
    add("--eval-interval", type=int, default=0, help="in steps; 0: after the last step only")
    add("--eval-iters", type=int, default=4)
    add("--save", type=Path, help="folder for a checkpoint after the last step")
    add("--save-interval", type=int, default=0, help="save also every so many steps")
    add("--load", type=Path, help="folder of the checkpoint to resume from")

    add = parser.add_argument_group("parallelism").add_argument
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--pipeline-model-parallel-size", type=int, default=1)
    add(
        "--num-virtual-stages-per-pipeline-rank",
        "--virtual-pipeline-model-parallel-size",
        dest="virtual_pipeline_model_parallel_size",
        type=int,
    )
    add("--expert-model-parallel-size", type=int, default=1)
    add("--expert-tensor-parallel-size", type=int, help="default: that of the other layers")
    add("--sequence-parallel", action="store_true")
    add("--use-distributed-optimizer", action="store_true")
    add("--overlap-grad-reduce", action="store_true")
    add("--overlap-param-gather", action="store_true")
    add("--recompute-granularity", choices=("full", "selective"))
    add("--recompute-method", choices=("uniform", "block"))
    add("--recompute-num-layers", type=int)
    add("--recompute-modules", nargs="+", metavar="MODULE")

    add = parser.add_argument_group("experts").add_argument
    add("--num-experts", dest="num_moe_experts", type=int)
    add("--moe-router-topk", type=int)
    add("--moe-router-load-balancing-type")
    add("--moe-aux-loss-coeff", type=float)
    add("--moe-token-dispatcher-type", default="alltoall")
    add("--moe-grouped-gemm", action="store_true")
    add("--moe-expert-capacity-factor", type=float)
    add("--moe-pad-expert-input-to-capacity", action="store_true")
    add("--moe-shared-expert-intermediate-size", type=int)
    return _complete(parser.parse_args())


def _complete(arguments: argparse.Namespace) -> argparse.Namespace:
    """Fill in defaults that follow from other arguments."""
    if arguments.min_lr is None:
        arguments.min_lr = arguments.lr / 10
    if arguments.lr_decay_iters is None:
        arguments.lr_decay_iters = arguments.train_iters
    if arguments.lr_warmup_iters is None:
        arguments.lr_warmup_iters = int(WARMUP_FRACTION * arguments.lr_decay_iters)
    return arguments


@dataclass(frozen=True, eq=False)
class Run:
    """What the command line asks for, once the files it names are read."""

    arguments: argparse.Namespace
    ds_moe_ext: dict[str, Any] | None  # what --ds-moe-ext-config holds
    strategy: str  # "plain" without an enabled ds_moe_ext block
    output: Path
    text: Text
    architecture: Architecture

    @property
    def dtype(self) -> str:
        """Of weights in forward."""
        return "bf16" if self.arguments.bf16 else "fp32"


def read_run(arguments: argparse.Namespace) -> Run:
    """Read the files that the command line names, and check what Megatron does not."""
    if arguments.train_iters < 1:
        raise ValueError(
            f"--train-iters {arguments.train_iters} is not a number of steps; give 1 or more"
        )
    if arguments.save_interval and arguments.save is None:
        raise ValueError(f"--save-interval {arguments.save_interval} needs --save FOLDER")
    path = arguments.ds_moe_ext_config
    document = None if path is None else read_json(path, "--ds-moe-ext-config")
    name = named(document or {}, arguments.output, Path("runs/megatron"))
    text, architecture = read_text(arguments.data), read_architecture(arguments)
    return Run(arguments, document, name.strategy, name.output, text, architecture)


LATEST = "latest_checkpointed_iteration.txt"
# How the distributed optimizer's state is cut. From 0.15 on as Megatron-LM does by default, for any
# number of data parallel ranks but the same model parallel sizes: `fully_reshardable` would do for
# all, but misplaces state where buckets are padded (upstream, 0.16.1; seen with tied embeddings in
# a pipeline).
CUT = (
    "dp_reshardable"
    if Version(megatron.core.__version__) >= Version("0.15")
    else "fully_sharded_model_space"
)


@dataclass(frozen=True, eq=False)
class Kept:
    """What a checkpoint is made of. All collective."""

    chunks: Sequence[DistributedDataParallel]  # this rank's part of the model
    optimizer: MegatronOptimizer  # with its state
    scheduler: OptimizerParamScheduler  # of the learning rate

    def save(self, folder: Path, iteration: int) -> None:
        """Write a checkpoint."""
        self._save(folder, iteration)
        if dist.get_rank() == 0:
            (folder / LATEST).write_text(str(iteration))
        dist.barrier()

    def save_beside(self, folder: Path, iteration: int) -> Any:
        """Begin to write one, as Megatron-LM does with `--async-save`.

        Returns:
            For Megatron's queue of such saves, which ends it.
        """
        request = self._save(folder, iteration, async_sharded_save=True)
        if dist.get_rank() == 0:
            request.finalize_fns.append(lambda: (folder / LATEST).write_text(str(iteration)))
        return request

    def _save(self, folder: Path, iteration: int, **how: Any) -> Any:
        path = folder / f"iter_{iteration:07d}"
        if dist.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        progress = {"iteration": iteration, "checkpoint_version": 3.0}
        return dist_checkpointing.save(self._state(is_loading=False) | progress, str(path), **how)

    def load(self, folder: Path) -> int:
        """Take over the latest checkpoint of a folder.

        Returns:
            Steps that it had behind it.

        Raises:
            ValueError: there is none, or Megatron cannot load it into this optimizer.
        """
        latest = folder / LATEST
        if not latest.is_file():
            raise ValueError(f"--load {folder} has no file {LATEST}; name the folder of --save")
        path = folder / f"iter_{int(latest.read_text()):07d}"
        start_adam(self.optimizer)
        asked = self._state(is_loading=True)
        has_two = 0 in asked["optimizer"]
        state = dist_checkpointing.load(asked, str(path))
        if (0 in state["optimizer"]) != has_two:
            raise ValueError(
                f"--load {path}: with --expert-model-parallel-size above 1 Megatron keeps a second "
                "optimizer for experts, with 1 it does not, and one cannot load the other's state; "
                "load with a size above 1 what was saved so, and with 1 what was saved with 1"
            )
        for name, module in self._modules().items():
            module.load_state_dict(state[name])
        load_optimizer(self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["opt_param_scheduler"])
        return int(state["iteration"])

    def _modules(self) -> dict[str, MegatronModule]:
        if len(self.chunks) == 1:
            return {"model": self.chunks[0].module}
        return {f"model{index}": chunk.module for index, chunk in enumerate(self.chunks)}

    def _state(self, *, is_loading: bool) -> dict[str, Any]:
        metadata = {"distrib_optim_sharding_type": CUT, "chained_optim_avoid_prefix": True}
        model = {
            name: module.sharded_state_dict(metadata=metadata)
            for name, module in self._modules().items()
        }
        return {
            **model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata),
            "opt_param_scheduler": self.scheduler.state_dict(),
        }


# Megatron's distributed optimizer loads what Apex's or Transformer Engine's Adam keeps. Without
# them torch's Adam is used, and (upstream, 0.14 to 0.16) two things stop it: its state has to be
# there already, and the step counts in it must not be.


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    is_chain = isinstance(optimizer, ChainedOptimizer)
    return optimizer.chained_optimizers if is_chain else [optimizer]


def _adams(optimizer: MegatronOptimizer) -> list[torch.optim.Adam]:
    """Those of torch that a distributed optimizer uses."""
    return [
        part.optimizer
        for part in _parts(optimizer)
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam)
    ]


def start_adam(optimizer: MegatronOptimizer) -> None:
    """Give torch's Adam its state before the first step."""
    for adam in _adams(optimizer):
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            adam.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Load, with torch's step counts set aside between Adam's own part and Megatron's."""
    steps: dict[Tensor, Tensor] = {}

    def set_aside(adam: torch.optim.Optimizer) -> None:
        steps.update({parameter: kept.pop("step") for parameter, kept in adam.state.items()})

    adams = _adams(optimizer)
    hooks = [adam.register_load_state_dict_post_hook(set_aside) for adam in adams]
    with torch.no_grad():  # it copies into views of float32 weights
        optimizer.load_state_dict(state)
    for hook in hooks:
        hook.remove()
    for adam in adams:
        for parameter, kept in adam.state.items():
            kept["step"] = steps[parameter].clone()
