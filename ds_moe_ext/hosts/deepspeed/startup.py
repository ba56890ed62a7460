# SPDX-License-Identifier: Apache-2.0
"""What is checked before DeepSpeed builds anything: the JSON block, the model, the ranks."""

from __future__ import annotations

import base64
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import hjson
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import init_distributed
from torch import nn

from ds_moe_ext.core.layout import Grid
from ds_moe_ext.hosts import huggingface
from ds_moe_ext.hosts.attachment import experts, startup_check
from ds_moe_ext.hosts.attachment.grid import Needs
from ds_moe_ext.hosts.attachment.host_layer import Found
from ds_moe_ext.hosts.attachment.notices import ENABLED, OWNERS, refuse, settle
from ds_moe_ext.hosts.attachment.replacement import Blueprint, draw, wanted
from ds_moe_ext.hosts.attachment.startup_check import (
    PATIENCE_S,
    Description,
    Start,
    is_first,
    start_of,
    starting,
)
from ds_moe_ext.hosts.deepspeed import native, zero_3
from ds_moe_ext.hosts.deepspeed.guard import log_old_lock
from ds_moe_ext.hosts.deepspeed.rank_groups import RoleUnit, Stages, TensorParallel, is_of_sequences
from ds_moe_ext.hosts.deepspeed.refusals import (
    AT_STAGE_3,
    OWNERS_AT_STAGE_3,
    UNSUPPORTED,
    WITH_ROLES,
    Given,
)
from ds_moe_ext.hosts.steps.host import device_names
from ds_moe_ext.hosts.steps.optimizers import takes_whole_weights
from ds_moe_ext.hosts.zebra.stage_model import moved_by
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.strategies.settings import BLOCK, Settings, misspelt, read_settings

FINDERS = (huggingface.find, native.find, experts.find_registered)

INITIALIZE = "deepspeed.initialize"

GRID = (
    f"the grid (where nodes have unequally many ranks, set {BLOCK}.expert_parallel_size and "
    f"{BLOCK}.expert_sharding_size)"
)


def blueprint_of(
    document: Mapping[str, Any], model: nn.Module, mpu: Any, mesh: Any = None
) -> Blueprint | None:
    """What the block asks for on this model; None where it is absent or not enabled, and before
    the number of ranks is known."""
    settings, strategy = read_settings(document)
    if strategy is None:
        return None
    given = Given(document, model, mpu, mesh)
    strategy = strategy.settled(partial(devices_of, given), micro_batch_of(document))
    strategy = checked(given, settings, strategy)
    size = world_size()
    if size is None:
        return None
    with zero_3.described(model):
        stages = Stages.of(model)
        if stages is not None:
            stages.check(_found(settings, model))
            size = stages.size
            if moved_by(strategy) is not None:
                keys: Any = strategy
                strategy = replace(keys, moved=None)  # numbers of all stages' layers
        blueprint = draw(settings, strategy, model, FINDERS, size, needs=needs_of(document))
    if shards_weights(document):
        zero_3.check_owners(blueprint)
    return blueprint


def shards_weights(document: Mapping[str, Any]) -> bool:
    """Whether ZeRO does, which is its stage 3."""
    zero = document.get("zero_optimization")
    return isinstance(zero, Mapping) and zero.get("stage") == 3


def needs_of(document: Mapping[str, Any], optimizer: str = "") -> Needs:
    """What is needed of sizes that the block leaves open."""
    return Needs(
        even="zero_optimization.stage is 3" if shards_weights(document) else "",
        whole=f"the optimizer is {optimizer}" if takes_whole_weights(optimizer) else "",
    )


def checked(given: Given, settings: Settings, strategy: Strategy) -> Strategy:
    """The strategy as it can be had with the rest of what was given."""
    given = replace(given, strategy=strategy)
    refuse(UNSUPPORTED, given)
    if shards_weights(given.document):
        refuse(AT_STAGE_3, given, context=f"{ENABLED} and zero_optimization.stage is 3")
    log = start_of(INITIALIZE).settled.append
    strategy = settle(OWNERS, strategy, (OWNERS_AT_STAGE_3,), given, log)
    if strategy.roles is not None:
        refuse(WITH_ROLES, given, context=f"{BLOCK}.strategy is {settings.strategy!r}")
        profile = getattr(strategy, "profile", None)
        if profile is not None and profile.sequence_length is None:
            raise ValueError(
                f"{BLOCK}.zebra.profile needs the key 'sequence_length' under DeepSpeed, which "
                "knows the length only with the first batch; add it"
            )
    if settings.sequence_parallel and TensorParallel.of(given.mpu).group is None:
        raise ValueError(
            f"{BLOCK}.sequence_parallel is true, but no mpu with tensor parallel groups was passed "
            "to deepspeed.initialize; pass it, or leave sequence_parallel out"
        )
    return strategy


def agree(given: Given) -> None:
    """Compare what the ranks start with, once a start, before their grid is known. Collective.
    ValueError on all ranks, where something differs."""
    _make_world()
    start_of(INITIALIZE).agree(description(given))


def description(given: Given, grid: Grid | None = None) -> Description:
    """What all ranks must start with alike, as texts; ``grid`` where it is known."""
    document, model = given.document, given.model
    settings, _ = read_settings(document)
    text = {
        **startup_check.settings_of(settings, document[BLOCK]),
        "train_micro_batch_size_per_gpu": str(micro_batch_of(document)),
        **startup_check.versions("deepspeed", deepspeed.__version__),
    }
    with zero_3.described(model):
        if Stages.of(model) is None or grid is not None:  # else others have other layers
            text.update(startup_check.layers_of(_found(settings, model)))
            if TensorParallel.of(given.mpu).group is None:  # else a rank has parts of weights
                text.update(startup_check.weights_of(model))
                text.update(startup_check.empty_of(model))
    if grid is not None:
        text[GRID] = f"{grid.num_ep_ranks} EP ranks of {grid.etp_size} ranks"
    return text


def _found(settings: Settings, model: nn.Module) -> list[Found]:
    return [layer for finder in FINDERS for layer in finder(model, wanted(settings))]


@contextmanager
def initializing() -> Iterator[None]:
    """A ``deepspeed.initialize`` is in the block: ranks that run by us leave it together."""
    start = Start(INITIALIZE)
    with starting(start):
        try:
            yield
        except ValueError as error:
            names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            knows_where = all(name in os.environ for name in names) and world_size() != 1
            if start.is_wanted and not dist.is_initialized() and knows_where:
                # Others, who found nothing wrong, wait for the world and then ask why.
                stated = (
                    f"{error} (this rank notifies the others, which have not reached "
                    f"{INITIALIZE} yet)"
                )
                timer = threading.Timer(PATIENCE_S, warnings.warn, [stated])
                timer.start()
                try:
                    _make_world()
                finally:
                    timer.cancel()
            raise


def check_initialize(
    initialize: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> inspect.BoundArguments:
    """Check the arguments of ``deepspeed.initialize`` before it makes any process group.

    Returns:
        The arguments; where ranks have roles, with an mpu that says so.
    """
    bound = inspect.signature(initialize).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    document, model, mpu = document_of(given), given["model"], given["mpu"]
    if document is not None and is_first() and (reported := misspelt(document)):
        warnings.warn(reported, stacklevel=3)
    if document is None or model is None:
        return bound
    is_wanted = off_by(document) is None
    start_of(INITIALIZE).is_wanted = is_wanted
    is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
    is_on_cpu = get_accelerator().device_name() == "cpu"  # where DeepSpeed has its own collectives
    if is_wanted and is_first_of_node and is_on_cpu and not dist.is_initialized():
        log_old_lock()
    blueprint = blueprint_of(document, model, mpu, given["mesh_param"])
    if blueprint is not None and blueprint.strategy.roles is not None:
        asked = Given(document, model, mpu)
        agree(asked)
        TensorParallel.of(mpu).check()
        sequences = mpu.get_sequence_parallel_group() if is_of_sequences(mpu) else None
        roles, stages = blueprint.strategy.roles, Stages.of(model)
        unit = RoleUnit.build(roles, asked.tensor_size, sequences, stages)
        if stages is None:
            given["mpu"] = unit
        else:
            model.mpu = lambda: unit  # whom DeepSpeed asks for it
    return bound


def off_by(document: Mapping[str, Any]) -> str | None:
    """How a configuration says that it does not want us, for a person; None where it does, or may
    have meant to."""
    block = document.get(BLOCK)
    if block is None:
        return "absent"
    return "off" if isinstance(block, Mapping) and not block.get("enabled") else None


def _make_world() -> None:
    """Make the world of all ranks, as ``deepspeed.initialize`` would."""
    if not dist.is_initialized():
        backend = get_accelerator().communication_backend_name()
        init_distributed(dist_backend=backend, dist_init_required=True)


def devices_of(given: Given) -> list[str]:
    """Name of each rank's device; ranks agree first. Collective."""
    agree(given)
    return device_names(torch.device(get_accelerator().current_device_name()))


def micro_batch_of(document: Mapping[str, Any]) -> int | None:
    """Samples of a rank's micro-batch; None where they follow from other keys, or are nonsense,
    of which DeepSpeed will complain."""
    given = document.get("train_micro_batch_size_per_gpu")
    return given if type(given) is int and given > 0 else None


def check_inference(given: Mapping[str, Any]) -> None:
    """Refuse the block in the arguments of ``deepspeed.init_inference``."""
    document = document_of({"config": given["config"]}) or {}
    if BLOCK in document or BLOCK in given["kwargs"]:
        raise ValueError(
            f"{BLOCK} is in the configuration of deepspeed.init_inference, but {BLOCK} runs "
            "experts under deepspeed.initialize only; remove it there, and give init_inference the "
            "stock model with the weights that ds_moe_ext.full_state_dict or save_16bit_model "
            "exports"
        )


def document_of(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The configuration as DeepSpeed will find it; None where it will complain itself."""
    args = given.get("args")
    named = (getattr(args, f"{name}_config", None) for name in ("deepspeed", "deepscale"))
    configs = (given.get("config"), given.get("config_params"), *named)
    config = next((config for config in configs if config is not None), None)
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str):
        return None
    try:
        if os.path.exists(config):
            # What is in a pipe can be read once, and DeepSpeed will.
            text = Path(config).read_text() if os.path.isfile(config) else ""
        else:  # DeepSpeed also takes the JSON itself in base64
            text = base64.urlsafe_b64decode(config).decode()
        document = hjson.loads(text)  # as DeepSpeed reads it: with comments
    except (OSError, RecursionError, ValueError):
        return None
    return document if isinstance(document, Mapping) else None


def world_size() -> int | None:
    """Ranks of the run; None where, as under MPI, they are known once the process group is made."""
    if dist.is_initialized():
        return dist.get_world_size()
    given = os.environ.get("WORLD_SIZE")
    return None if given is None else int(given)
