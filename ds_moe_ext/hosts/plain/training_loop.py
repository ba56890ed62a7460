# SPDX-License-Identifier: Apache-2.0
"""Replaced layers in a training loop of the user's own, in plain PyTorch."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ds_moe_ext.core.comm import sum_in_place
from ds_moe_ext.hosts.attachment.notices import HOMES
from ds_moe_ext.hosts.attachment.replacement import stays_in_slots
from ds_moe_ext.hosts.attachment.startup_check import Start, starting
from ds_moe_ext.hosts.plain import state_names
from ds_moe_ext.hosts.plain.plain_host import NAME, Experts, PlainHost
from ds_moe_ext.hosts.steps.host import check_alike, run_on, settle_alike
from ds_moe_ext.hosts.steps.optimizers import BY_ELEMENTS, Stepping, check_kind, split_by
from ds_moe_ext.hosts.steps.training_run import MONITORED, Record, Run, WriteEvents, run_of
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
            f"{NAME} was called before torch.distributed.init_process_group, so that it does not "
            "know the ranks; call that first, and start with torchrun, also for one rank"
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
            f"{NAME} was given {_in_a_line(model)} for a model; give a torch.nn.Module, and the "
            "block second"
        )
    is_whole = isinstance(micro_batches, int) and not isinstance(micro_batches, bool)
    if not is_whole or micro_batches < 1:
        raise ValueError(
            f"{NAME} was given micro_batches={micro_batches!r}; give the number of backward passes "
            "of an optimizer step, 1 or more, or leave it out where it is 1"
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
    """What ``attach`` gives: the calls that a training loop makes of its experts.

    Attributes:
        model: as given; ``fully_shard`` changes it in place, and ``DistributedDataParallel`` holds
            it.
        experts: of this rank.
        monitor: see ``attach``.
    """

    model: nn.Module
    experts: Experts
    monitor: WriteEvents | None = None
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
                f"watch was given {_in_a_line(optimizer)}, which is no torch.optim.Optimizer; give "
                "the optimizer itself that steps the model's weights, without what wraps it"
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
            splitting=split_by(run.blueprint.grid.cell_size),
            by_elements=f"experts move (strategy {run.blueprint.settings.placing})",
            has_masters=getattr(optimizer, "master_weights", False),
        )
        run.settle(HOMES, BY_ELEMENTS, stepping)
        if stays_in_slots(run.blueprint):
            stepping = replace(stepping, by_elements="")
        check_kind(stepping)
        self._optimizer = self.experts.optimizer = optimizer
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    def _check_steps_experts(self, run: Run, optimizer: torch.optim.Optimizer) -> None:
        """Look at what an optimizer has, again where other experts are trained than before.

        Raises:
            ValueError: it lacks some of them, or steps them in unlike ways.
        """
        trained = {p for p in self.experts.parameters if p.requires_grad}
        if self._optimizer is not None and trained == self._checked:
            return
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        if missing := len(trained - stepped):
            raise ValueError(
                f"{missing} of the {len(trained)} expert weights of this rank that are trained are "
                f"not in the optimizer; make it from model.parameters() behind {NAME}, which "
                "replaces them, or give it by add_param_group those that were frozen then"
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
        """Homes sum gradients; those that a closure makes, behind it.

        Args:
            optimizer: that is about to step.
            args: of its ``step``, itself among them.
            named: likewise.

        Returns:
            Both as they shall be; None leaves them as they are.

        Raises:
            ValueError: experts are trained by now that it does not step.
        """
        run = run_of(self.model)
        if self._is_asleep or run is None:
            return None
        self._check_steps_experts(run, optimizer)
        closure = args[1] if len(args) > 1 else named.get("closure")
        if closure is None:
            self.experts.average()
            return None
        if len(args) > 1:
            return (optimizer, self._averaging(closure), *args[2:]), named
        return args, {**named, "closure": self._averaging(closure)}

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def averaging() -> Any:
            loss = closure()
            self.experts.average()
            return loss

        return averaging

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
        if self.experts.num_homes:
            of_experts = _norm(experts).double().to(self.device) ** 2
            square += sum_in_place(of_experts, None) / self.experts.num_homes
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
            return state_names.state_of(self.model, self._optimizer, self._stored())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Collective.

        Args:
            state: as ``state_dict`` made it, with what was read in it.
        """
        with self._sleeping():
            state_names.load(self.model, self._optimizer, state, self._stored())
        run = run_of(self.model)
        if run is not None:
            for layer in run.layers:
                layer.routed.start_anew()
            planning = run.planning
            planning.resume(planning.job.homes, planning.remembered_ILCE[:0])

    def _stored(self) -> dict[str, state_names.Stored]:
        run = run_of(self.model)
        return {} if run is None else state_names.stored_of(self.model, run)

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
