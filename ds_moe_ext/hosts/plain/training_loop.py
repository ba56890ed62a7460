# SPDX-License-Identifier: Apache-2.0
"""Replaced layers in a training loop of the user's own, in plain PyTorch."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.tensor import DTensor

from ds_moe_ext.core.comm import sum_in_place
from ds_moe_ext.hosts.attachment.notices import OWNERS
from ds_moe_ext.hosts.attachment.replacement import stays_in_slots
from ds_moe_ext.hosts.attachment.startup_check import Start, starting
from ds_moe_ext.hosts.plain.plain_host import NAME, Experts, PlainHost
from ds_moe_ext.hosts.steps.host import check_alike, run_on, settle_alike
from ds_moe_ext.hosts.steps.optimizers import BY_ELEMENTS, Stepping, check_kind, split_by
from ds_moe_ext.hosts.steps.training_run import MONITORED, Record, Run, WriteEvents, run_of
from ds_moe_ext.moe.sharding import Shard, whole_weights
from ds_moe_ext.schedule.task import INTRA
from ds_moe_ext.strategies.settings import BLOCK, read_file, read_settings


def attach(
    model: nn.Module,
    config: str | Path | Mapping[str, Any],
    *,
    micro_batches: int = 1,
    monitor: WriteEvents | None = None,
) -> Attachment:
    """Replace a model's MoE layers, for a training loop of your own. Collective, over the world.

    Wrap the model in ``DistributedDataParallel`` or by ``fully_shard`` after this, and make its
    optimizer after that::

        moe = ds_moe_ext.attach(model, "ds_moe_ext.json")
        model = DistributedDataParallel(model)  # leaves the experts alone
        optimizer = torch.optim.AdamW(model.parameters())
        moe.watch(optimizer)

    Args:
        model: on its device, with its weights, or on the meta device; changed in place. All ranks
            train it, each on data of its own.
        config: the block ``ds_moe_ext``, or a document that has it; or the path of such a JSON
            file, or a name of ``configs/strategies``. Where it is not enabled the model stays as it
            is.
        micro_batches: backward passes of an optimizer step.
        monitor: called on rank 0 behind every tenth step with a list of ``(name, value, step)``.

    Raises:
        ValueError: on all ranks: the block is malformed, or asks for what cannot be done.
    """
    if not dist.is_initialized():
        raise ValueError(
            f"{NAME} was called before torch.distributed.init_process_group, so the ranks are "
            "unknown; call that first, and start with torchrun, even for one rank"
        )
    _check_arguments(model, micro_batches, monitor)
    with starting(Start(NAME, is_wanted=True)) as start:
        block = block_of(config)
        settings, strategy = read_settings({BLOCK: block})
        experts = Experts()
        if strategy is None:
            start.is_wanted = False
            start.stand_aside("off")
        else:
            host = PlainHost(model, block, micro_batches, experts)
            run_on(host, model, settings, strategy)
    return Attachment(model, experts, monitor)


def _check_arguments(model: Any, micro_batches: Any, monitor: Any) -> None:
    """Raises ValueError where one is not what ``attach`` takes."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{NAME} was given {_in_a_line(model)} as the model; give a torch.nn.Module, then "
            "the block"
        )
    is_whole = isinstance(micro_batches, int) and not isinstance(micro_batches, bool)
    if not is_whole or micro_batches < 1:
        raise ValueError(
            f"{NAME} was given micro_batches={micro_batches!r}; give the number of backward "
            "passes of an optimizer step, 1 or more, or leave it out for 1"
        )
    if not (monitor is None or callable(monitor)):
        raise ValueError(
            f"{NAME} was given monitor={monitor!r}, which cannot be called; give a function of a "
            "list of (name, value, step), or leave it out"
        )


def _in_a_line(value: object) -> str:
    """Some characters of it: a model, for one, has many lines."""
    return " ".join(reprlib.repr(value).split())


def block_of(given: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """What the user's configuration says of us."""
    document = given
    if isinstance(given, str | Path):
        document = read_file(given, f"{NAME} was given {str(given)!r}")
    if not isinstance(document, Mapping):
        raise ValueError(
            f"{NAME} was given {document!r}; give the block {BLOCK!r}, a document that has it, or "
            "the path of one"
        )
    block = document.get(BLOCK, document)
    if not isinstance(block, Mapping):
        raise ValueError(f"{BLOCK} is {block!r}; make it a JSON object")
    return block


@dataclass(eq=False)
class Attachment:
    """What ``attach`` gives: the calls that a training loop makes of its experts."""

    # as given; ``fully_shard`` changes it in place, and ``DistributedDataParallel`` holds it
    model: nn.Module
    experts: Experts  # of this rank
    monitor: WriteEvents | None = None  # see ``attach``
    _optimizer: torch.optim.Optimizer | None = field(default=None, init=False)
    _num_steps: int = field(default=0, init=False)
    _is_asleep: bool = field(default=False, init=False)
    _checked: set[nn.Parameter] = field(default_factory=set, init=False)

    @property
    def ds_moe_ext(self) -> Record:
        """By which ``recorder_of`` and ``joined`` know what it carries."""
        return Record(run_of(self.model))

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return next(self.model.parameters()).device

    @property
    def expert_parameters(self) -> set[nn.Parameter]:
        """This rank's experts, for ``fully_shard(..., ignored_params=)``: each rank has others."""
        return set(self.experts.parameters)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear of the optimizer's steps. Needed once, before the first backward pass. Collective.

        Args:
            optimizer: of the model's weights, the experts' among them.

        Raises:
            ValueError: it does not step the experts, or not as it would without us.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"watch was given {_in_a_line(optimizer)}, which is not a "
                "torch.optim.Optimizer; give the optimizer that steps the model's weights, "
                "without a wrapper"
            )
        run = run_of(self.model)
        if self._optimizer is not None:
            raise ValueError("an optimizer is watched already; step all weights with one")
        if run is None:
            self._optimizer = optimizer
            return
        settle_alike(run, optimizer)
        self._check_steps_experts(run, optimizer)
        stepping = Stepping(
            optimizer,
            splitting=split_by(run.blueprint.grid.etp_size),
            by_elements=f"experts move (strategy {run.blueprint.settings.placing})",
            has_masters=getattr(optimizer, "master_weights", False),
        )
        run.settle(OWNERS, BY_ELEMENTS, stepping)
        if stays_in_slots(run.blueprint):
            stepping = replace(stepping, by_elements="")
        check_kind(stepping)
        self._optimizer = self.experts.optimizer = optimizer
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    def _check_steps_experts(self, run: Run, optimizer: torch.optim.Optimizer) -> None:
        """Raises ValueError where an optimizer lacks experts that are trained, or steps them in
        unlike ways; looked at again where others are trained than before."""
        trained = {p for p in self.experts.parameters if p.requires_grad}
        if self._optimizer is not None and trained == self._checked:
            return
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        if missing := len(trained - stepped):
            raise ValueError(
                f"{missing} of the {len(trained)} expert weights of this rank that are trained "
                f"are not in the optimizer; create it from model.parameters() after {NAME}, "
                "which replaces them, or add weights that were frozen then with "
                "add_param_group"
            )
        check_alike(run, optimizer)
        self._checked = trained

    def saw_loss(self, loss: Tensor) -> None:
        """Show the loss of a micro-batch in the report. It is read later, at most every tenth step.

        Args:
            loss: one number, as it is differentiated.
        """
        run = run_of(self.model)
        if run is not None and run.recorder.ranks is not None:
            run.recorder.ranks.own.saw_loss(loss.reshape(()))

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Owners sum gradients; those that a closure makes, behind it. A hook before ``step``,
        whose arguments it is given, the optimizer itself among them, and may change."""
        run = run_of(self.model)
        if self._is_asleep or run is None:
            return None
        self._check_steps_experts(run, optimizer)
        closure = args[1] if len(args) > 1 else named.get("closure")
        if closure is None:
            self.experts.average()
            return None

        def averaging() -> Any:
            loss = closure()
            self.experts.average()
            return loss

        if len(args) > 1:
            return (optimizer, averaging, *args[2:]), named
        return args, {**named, "closure": averaging}

    def _after_step(self) -> None:
        run = run_of(self.model)
        if self._is_asleep or run is None:
            return
        self.experts.is_averaged = False
        run.after_step(self._num_steps)
        self._num_steps += 1
        is_due = run.rank == 0 and run.monitor.is_on and self._num_steps % MONITORED == 0
        if self.monitor is not None and is_due:
            run.monitor.show(run.recorder, self.monitor, self._num_steps)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside, with their forward passes, are not the last of a step: gradients
        of copied experts wait for it. To leave it out is right, and slower."""
        before, self.experts.is_last_pass = self.experts.is_last_pass, False
        try:
            yield
        finally:
            self.experts.is_last_pass = before

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients to a norm, in which each expert counts once. Collective.

        ``torch.nn.utils.clip_grad_norm_`` would take the norm of this rank's experts alone, which
        is another on each rank.

        Args:
            max_norm: above which they are scaled down.

        Returns:
            The norm before, 0-dim, the same on all ranks.
        """
        self.experts.average()
        experts = [p for p in self.experts.parameters if p.grad is not None]
        own = set(experts)
        dense = [p for p in self.model.parameters() if p.grad is not None and p not in own]
        square = _norm(dense).double() ** 2
        if self.experts.num_owners:
            of_experts = _norm(experts).double().to(self.device) ** 2
            square += sum_in_place(of_experts, None) / self.experts.num_owners
        total = square.sqrt()
        for parameters in (dense, experts):
            norm = total.to(parameters[0].dtype) if parameters else total
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return total

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer for ``torch.distributed.checkpoint``: experts by their numbers in the
        model, so that other numbers of ranks and other strategies can read them. Collective.

        Load into one of these, and give it to ``load_state_dict``::

            state = moe.state_dict()
            torch.distributed.checkpoint.load(state, checkpoint_id=folder)
            moe.load_state_dict(state)
        """
        with self._sleeping():
            return _state_of(self.model, self._optimizer, self._stored())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state. Collective.

        Args:
            state: as ``state_dict`` made it, with what was read in it.
        """
        with self._sleeping():
            _load(self.model, self._optimizer, state, self._stored())
        run = run_of(self.model)
        if run is not None:
            for layer in run.layers:
                layer.routed.start_anew()
            planning = run.planning
            planning.resume(planning.job.owners, planning.remembered_ILCE[:0])

    def _stored(self) -> dict[str, _Stored]:
        run = run_of(self.model)
        return {} if run is None else _stored_of(self.model, run)

    @contextmanager
    def _sleeping(self) -> Iterator[None]:
        """torch steps an optimizer that has no states yet, by nothing, to see what it keeps."""
        self._is_asleep = True
        try:
            yield
        finally:
            self._is_asleep = False


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    """Of their gradients, wherever their parts lie. Collective where they are sharded."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# Model and optimizer for ``torch.distributed.checkpoint``, experts by their numbers in the model.
#
# On a rank an expert's weight is ``<layer>.<weight>.<slot>``; two ranks have other experts in the
# same slot, and experts may move. Saved it is ``<layer>.<weight>.<number of the expert>``, which
# any layout can read. Hyperparameters are saved by the number of their parameter group.
#
# Names are torch's own for checkpoints, without what wrappers put in. An expert that is not
# found by its name would be saved by its slot, where other ranks overwrite it: all must be found.


MODEL, OPTIMIZER, STATE, GROUPS, PARAMS = "model", "optimizer", "state", "param_groups", "params"
"""Keys: ours and torch's."""


class _Stored(NamedTuple):
    """An expert's weight, and what the optimizer keeps of it, as a checkpoint has them."""

    name: str  # with the number of the expert
    shard: Shard  # the part of the expert that this rank has
    number: int  # of the weight among those of an expert
    ep_rank: dist.ProcessGroup | None  # the ranks that have its parts; None where this one has all
    parameter: nn.Parameter  # that holds it here

    def whole(self, part: Any) -> Any:
        """From this rank's part; what has no part for each element is as it is. Collective."""
        if self.ep_rank is None or not isinstance(part, Tensor) or not part.dim():
            return part
        return whole_weights(part.detach()[None], self.shard, self.number, self.ep_rank)[0]

    def part(self, whole: Any) -> Any:
        has_parts = isinstance(whole, Tensor) and whole.dim() > 0
        return self.shard.of(self.number, whole) if has_parts else whole


def _stored_of(model: nn.Module, run: Run) -> dict[str, _Stored]:
    """By name, how each expert weight of this rank is stored."""
    layout = run.layers[0].routed.layer_context.layout
    ep_rank = layout.group("esp", INTRA) if layout.grid.etp_size > 1 else None
    expert_of: dict[nn.Parameter, tuple[int, Shard, int]] = {}
    for layer, owner in zip(run.layers, run.planning.job.owners):
        numbers = owner.experts_of(layout.index("ep")).tolist()
        for expert, slot in zip(numbers, layer.hosted.slots(), strict=True):
            for number, parameter in enumerate(slot.parameters):
                expert_of[parameter] = expert, layer.hosted.shard, number
    stored = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in expert_of:
            expert, shard, number = expert_of[parameter]
            # As torch's states have it: they leave out where ``torch.compile``, checkpointing of
            # activations and the like have put a module; there is no public list of what.
            (plain,) = torch_states._get_fqns(model, name)
            saved = f"{plain.rpartition('.')[0]}.{expert}"
            stored[plain] = _Stored(saved, shard, number, ep_rank, parameter)
    return stored


def _state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, stored: Mapping[str, _Stored]
) -> dict[str, Any]:
    """What a checkpoint has of a model and its optimizer, if any. Collective."""
    weights = torch_states.get_model_state_dict(model)
    state: dict[str, Any] = {MODEL: _wholes(weights, stored, _parameters(stored))}
    if optimizer is not None:
        kept: Any = torch_states.get_optimizer_state_dict(model, optimizer)
        groups = [{k: v for k, v in group.items() if k != PARAMS} for group in kept[GROUPS]]
        wholes = _wholes(kept[STATE], stored, _with_states(optimizer))
        state[OPTIMIZER] = {STATE: wholes, GROUPS: groups}
    return state


def _load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    stored: Mapping[str, _Stored],
) -> None:
    """Put what was read where it belongs. Collective. Raises ValueError where it lacks an expert of
    this rank, or what the optimizer keeps of it."""
    weights = _parts(state[MODEL], stored, _parameters(stored))
    torch_states.set_model_state_dict(model, weights)
    if optimizer is not None:
        own: Any = torch_states.get_optimizer_state_dict(model, optimizer)
        read = state[OPTIMIZER]
        pairs = zip(read[GROUPS], own[GROUPS], strict=True)
        groups = [{**options, PARAMS: group[PARAMS]} for options, group in pairs]
        parts = _parts(read[STATE], stored, _with_states(optimizer))
        kept: Any = {STATE: parts, GROUPS: groups}
        torch_states.set_optimizer_state_dict(model, optimizer, kept)


def _parameters(stored: Mapping[str, _Stored]) -> set[Tensor]:
    return {each.parameter for each in stored.values()}


def _with_states(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    return {parameter for parameter, kept in optimizer.state.items() if kept}


def _wholes(
    state: Mapping[str, Any], stored: Mapping[str, _Stored], wanted: Collection[Tensor]
) -> dict[str, Any]:
    """Tensors, or what is kept of each, by the names of a checkpoint. Raises ValueError where not
    all is there that is wanted, as far as these are experts."""
    found = {stored[name].parameter for name in state if name in stored}
    for name, each in stored.items():
        if each.parameter in wanted and each.parameter not in found:
            raise ValueError(
                f"the weight {name} of an expert is missing from the state dict, so it would "
                "not be saved; remove the state_dict() hook that drops or renames it"
            )
    others = {name: value for name, value in state.items() if name not in stored}
    experts = ((stored[name], value) for name, value in state.items() if name in stored)
    return {each.name: _each(each.whole, value) for each, value in experts} | others


def _parts(
    state: Mapping[str, Any], stored: Mapping[str, _Stored], wanted: Collection[Tensor]
) -> dict[str, Any]:
    """The same by the names of this rank."""
    here = {each.name: name for name, each in stored.items()}
    found = {stored[here[name]].parameter for name in state if name in here}
    for each in stored.values():
        if each.parameter in wanted and each.parameter not in found:
            raise ValueError(
                f"the state to load has no {each.name}, an expert of this rank; call "
                "state_dict() on this rank and fill it with torch.distributed.checkpoint.load"
            )
    return {
        here.get(name, name): _each(stored[here[name]].part, value) if name in here else value
        for name, value in state.items()
    }


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: change(each) for key, each in value.items()}
    return change(value)
