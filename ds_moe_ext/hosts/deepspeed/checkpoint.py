"""Every rank's experts in DeepSpeed's checkpoints, one file an expert, by its global number.

DeepSpeed does this for its own MoE class, and so for the layers of that class that we replaced. For
the others it would save rank 0's experts and give them to every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import Tensor, nn

from ds_moe_ext.comm import all_gather_slots
from ds_moe_ext.hosts.deepspeed.engine import run_of
from ds_moe_ext.hosts.deepspeed.native import HostedMoE
from ds_moe_ext.hosts.experts import HostedExperts
from ds_moe_ext.hosts.found import Hosted
from ds_moe_ext.hosts.run import Run
from ds_moe_ext.schedule.task import INTER

LAYOUT_FILE = "ds_moe_ext.json"  # beside the checkpoint: how the run was laid out


def hosted(model: nn.Module) -> Iterator[tuple[int, str, HostedExperts]]:
    """The layers that DeepSpeed does not save itself: number, name and module.

    Numbers go on behind those that DeepSpeed gives to its own MoE layers.
    """
    number = sum(isinstance(module, MoE) for module in model.modules())
    for name, module in model.named_modules():
        if isinstance(module, HostedExperts):
            yield number, name, module
            number += 1


def without_experts(engine: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A module's state without the weights that go into files of their own."""
    names = {
        f"{name}.{parameter}"
        for _, name, module in hosted(engine.module)
        for parameter, _ in module.named_parameters()
    }
    return {key: value for key, value in state.items() if key not in names}


def save_experts(engine: Any, folder: str, tag: str) -> None:
    """Write this rank's experts, one file each; of ranks with the same experts the first writes."""
    run = run_of(engine)
    if run is None:
        return
    save_layout(run, folder, tag)
    for number, name, module in hosted(engine.module):
        group = f"ep_size_{run.blueprint.grid.num_cells}"
        if not engine.checkpoint_engine.is_data_parallel_writer(
            groups._get_expert_data_parallel_rank(group)
        ):
            continue
        for slot, expert in enumerate(held_by(module)):
            parameters = module.slots()[slot].parameters
            state = {
                f"{name}.{weight}.{expert}": parameter.detach().clone()
                for weight, parameter in zip(module.weight_names, parameters)
            }
            path = engine._get_expert_ckpt_name(
                folder, number, expert, tag, checkpoint_mp_rank=engine.checkpoint_mp_rank
            )
            engine.checkpoint_engine.save(state, path)


def load_experts(arguments: Mapping[str, Any], name_of_file: Callable[..., str]) -> None:
    """Put this rank's experts into the state that the module is about to load.

    Args:
        arguments: of DeepSpeed's ``load_moe_state_dict``; its ``state_dict`` is changed in place.
        name_of_file: DeepSpeed's rule for the name of an expert's file.
    """
    state, reader = arguments["state_dict"], arguments["checkpoint_engine"]
    mp_rank = arguments["checkpoint_mp_rank"] or 0
    for number, name, module in hosted(arguments["model"]):
        held = held_by(module)
        paths = [
            name_of_file(
                arguments["checkpoint_path"],
                number,
                expert,
                arguments["tag"],
                checkpoint_mp_rank=mp_rank,
            )
            for expert in held
        ]
        files = [reader.load(path, map_location="cpu") for path in paths]
        for weight in module.weight_names:
            for slot, (file, expert) in enumerate(zip(files, held)):
                state[f"{name}.{weight}.{slot}"] = file[f"{name}.{weight}.{expert}"]


def held_by(module: HostedExperts) -> list[int]:
    """Global numbers of the experts of a module, in slot order."""
    site = module.routed.site
    experts: list[int] = site.plan.home.experts_of(site.layout.index("ep")).tolist()
    return experts


def layout_of(run: Run) -> dict[str, Any]:
    """What a later run must match to go on with the optimizer states."""
    grid = run.blueprint.grid
    return {
        "strategy": run.blueprint.settings.strategy,
        "expert_parallel_size": grid.num_cells,
        "world_size": grid.world_size,
        "num_experts": {layer.name: layer.record().num_experts for layer in run.layers},
    }


def save_layout(run: Run, folder: str, tag: str) -> None:
    """Say beside the checkpoint how the run was laid out. Rank 0 alone."""
    if run.rank == 0:
        (Path(folder) / tag / LAYOUT_FILE).write_text(json.dumps(layout_of(run), indent=1))


def check_layout(engine: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that would be loaded into the wrong places, before anything is loaded.

    Args:
        arguments: of DeepSpeed's ``_load_checkpoint``.

    Raises:
        ValueError: what differs, and what to do.
    """
    run = run_of(engine)
    if run is None:
        return
    if engine.load_universal_checkpoint():
        raise ValueError(
            "checkpoint.load_universal is true, which is not supported with replaced experts; set "
            "it to false and load a regular checkpoint"
        )
    folder = Path(arguments["load_dir"]) / str(arguments["tag"])
    path = folder / LAYOUT_FILE
    if not path.exists():
        raise ValueError(
            f"{folder} has no {LAYOUT_FILE}: it was written without ds_moe_ext, or with it "
            "disabled; load it with ds_moe_ext disabled"
        )
    theirs, own = json.loads(path.read_text()), layout_of(run)
    keys = ["num_experts"]
    if arguments["load_optimizer_states"] and not arguments["load_module_only"]:
        keys += ["expert_parallel_size", "world_size"]
    for key in keys:
        if theirs[key] != own[key]:
            raise ValueError(
                f"the checkpoint {folder} has {key} {theirs[key]}, but this run {own[key]}: its "
                f"optimizer states would go to the wrong experts; run with {key} {theirs[key]}, or "
                "load the weights alone with load_module_only=True"
            )


@contextmanager
def whole_state(engine: Any) -> Iterator[None]:
    """While it lasts, ``engine.module_state_dict`` gives all experts. Collective."""
    if run_of(engine) is None:
        yield
        return
    engine.module_state_dict = lambda **_: gathered_state(engine.module)
    try:
        yield
    finally:
        del engine.module_state_dict


def gathered_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state with all experts under the host's names, as the stock class loads it.

    Collective. Every rank gets it; experts are in host memory, one weight at a time on the device.
    """
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, HostedExperts):
            slots = module.slots()
            for index, weight in enumerate(module.weight_names):
                state[f"{name}.{weight}"] = _joined(module, index)
                for slot in range(len(slots)):
                    del state[f"{name}.{weight}.{slot}"]
        elif isinstance(module, HostedMoE):
            prefix = f"{name}.experts.deepspeed_experts"
            slots = module.slots()
            for index, weight in enumerate(module.weight_names):
                for expert, tensor in enumerate(_joined(module, index)):
                    state[f"{prefix}.{expert}.{weight}"] = tensor
    return state


def _joined(module: Hosted, index: int) -> Tensor:
    """A weight of all experts, ``[E, ...]``, from this rank's. Collective.

    Args:
        index: of the weight among those of an expert.
    """
    routed = module.routed
    weights: list[Tensor] = [slot.parameters[index] for slot in module.slots()]
    if not weights:  # none of the layer's experts is at home here
        assert routed.copies is not None
        weights = [routed.copies.like[index]]
    local_S = torch.stack([weight.detach() for weight in weights])[: len(module.slots())]
    home, layout = routed.site.plan.home, routed.site.layout
    if home.num_cells == 1:
        return local_S
    held_C = [home.experts_of(cell) for cell in range(home.num_cells)]
    joined = all_gather_slots(local_S, [len(held) for held in held_C], layout.group("ep", INTER))
    order = torch.from_numpy(np.concatenate(held_C).argsort())
    return joined.cpu().index_select(0, order)  # all experts at once may not fit a device
