# SPDX-License-Identifier: Apache-2.0
"""Optimizers by kind: which can step part by part, and how many gradients a parameter has had."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from torch.optim import Optimizer

from ds_moe_ext.hosts.attachment.notices import ENABLED, Refusal, refuse
from ds_moe_ext.hosts.attachment.startup_check import is_first

# To these it is nothing where one weight ends and another begins: of torch, DeepSpeed and apex.
ELEMENT_BY_ELEMENT = {
    *("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "NAdam", "RAdam", "Adamax"),
    *("Adagrad", "FusedAdagrad", "DeepSpeedCPUAdagrad", "Adadelta"),
    *("Lion", "FusedLion", "DeepSpeedCPULion"),
    *("SGD", "FusedSGD", "ASGD", "RMSprop", "Rprop"),
}
OF_WHOLE_WEIGHTS = {
    *("Lamb", "LAMB", "FusedLamb", "FusedLAMB", "FusedMixedPrecisionLamb", "Lars", "LARS"),
    *("NovoGrad", "FusedNovoGrad", "Muon", "SingleDeviceMuon", "SingleDeviceMuonWithAuxAdam"),
}
# They keep something of each row and column, as well as looking at whole weights.
OF_ROWS_AND_COLUMNS = {"Adafactor", "CAME", "SM3", "Shampoo", "SOAP"}
OF_ALL_WEIGHTS = {"LBFGS", "Prodigy", "DAdaptAdam", "DAdaptAdaGrad", "DAdaptLion", "DAdaptSGD"}
COMMUNICATING = {
    *("OneBitAdam", "OneBitLamb", "ZeroOneAdam"),
    *("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "DistributedShampoo"),
    *("DistributedFusedAdam", "DistributedFusedLAMB"),
}
# By module too: torch's own and that of DeepSpeed's JSON do not communicate.
COMMUNICATING_MUONS = {
    (module, name)
    for module in ("muon", "deepspeed.runtime.zero.muon.original_muon")
    for name in ("Muon", "MuonWithAuxAdam")
}
# ZeRO gathers whole gradients for them.
WHOLE_UNDER_ZERO = {("deepspeed.runtime.zero.muon.muon_optimizer", "MuonWithAuxAdam")}


@dataclass(frozen=True, eq=False)
class Stepping:
    """An optimizer, and what becomes of the weights that it steps."""

    optimizer: Optimizer  # that steps them
    sharding: str = ""  # how ZeRO cuts them, for a person; empty where it does not
    splitting: str = ""  # how an ETP group's ranks split experts, likewise
    by_elements: str = ""  # who needs states to have a part for each element, likewise
    in_turns: str = ""  # who steps the weights of a group part by part, likewise
    has_masters: bool = False  # the optimizer itself keeps weights in 32 bits

    @property
    def kind(self) -> str:
        return type(self.optimizer).__name__

    @property
    def source(self) -> tuple[str, str]:
        """Module and name of its class."""
        return type(self.optimizer).__module__, self.kind

    @property
    def cut(self) -> str:
        """How it sees less than whole weights; empty where it does not."""
        is_gathered = self.source in WHOLE_UNDER_ZERO
        return self.splitting or ("" if is_gathered else self.sharding)


def takes_whole_weights(name: str) -> bool:
    """Whether an optimizer takes norms of whole weights, by the name of its class or that of
    DeepSpeed's JSON."""
    known = OF_WHOLE_WEIGHTS | OF_ROWS_AND_COLUMNS | {name for _, name in WHOLE_UNDER_ZERO}
    return name.lower() in {each.lower() for each in known}


def split_by(etp_size: int) -> str:
    """How the ranks of an ETP group split experts, for ``Stepping``."""
    return f"{etp_size} ranks split each expert (expert_sharding_size)" if etp_size > 1 else ""


def _communicates(given: Stepping) -> str:
    does = given.kind in COMMUNICATING or given.source in COMMUNICATING_MUONS
    return f"the optimizer is {'.'.join(given.source)}" if does else ""


def _clips(given: Stepping) -> str:
    norms = [group.get("max_grad_norm") or 0.0 for group in given.optimizer.param_groups]
    clips = [norm for norm in norms if 0 < norm < math.inf]
    return f"max_grad_norm of the optimizer ({given.kind}) is {clips[0]}" if clips else ""


def _looks_at_parts(given: Stepping) -> str:
    looks = given.kind in OF_WHOLE_WEIGHTS | OF_ROWS_AND_COLUMNS or given.source in WHOLE_UNDER_ZERO
    return f"the optimizer is {given.kind}, and {given.cut}" if looks and given.cut else ""


def _keeps_rows(given: Stepping) -> str:
    keeps = given.kind in OF_ROWS_AND_COLUMNS and given.by_elements
    return f"the optimizer is {given.kind}, and {given.by_elements}" if keeps else ""


def _is_apexs_adam(given: Stepping) -> bool:
    return given.kind == "FusedAdam" and given.source[0].startswith("apex.")


def _keeps_replicas(given: Stepping) -> str:
    keeps = _is_apexs_adam(given) and given.has_masters and given.by_elements
    return f"apex's FusedAdam has master_weights, and {given.by_elements}" if keeps else ""


def _counts_by_group(given: Stepping) -> str:
    counts = _is_apexs_adam(given) and given.in_turns
    return f"the optimizer is apex's FusedAdam, and {given.in_turns}" if counts else ""


def _names(*kinds: set[str]) -> str:
    return ", ".join(sorted(set[str]().union(*kinds)))


# Where states must have a part for each element.
BY_ELEMENTS = (
    Refusal(
        f"{_names(OF_ROWS_AND_COLUMNS)} under DeepSpeed, or where experts move",
        _keeps_rows,
        "it keeps row and column states, which have no entry per element",
        "use an optimizer such as AdamW, or ep in plain PyTorch",
    ),
    Refusal(
        "apex's FusedAdam with master_weights",
        _keeps_replicas,
        "it keeps master copies of its initial weights, not of the weights that a rank has now",
        "use it without master_weights (bf16, fp16 and ZeRO keep weights in 32 bits), or "
        "torch.optim.AdamW",
    ),
)
OPTIMIZERS = (
    Refusal(
        f"{_names(COMMUNICATING)}, and Muon and MuonWithAuxAdam of the package muon and of "
        "DeepSpeed's original_muon",
        _communicates,
        "it runs its own collectives, over ranks that have different experts",
        "use another, as AdamW or torch.optim.Muon",
    ),
    Refusal(
        _names(OF_ALL_WEIGHTS),
        lambda given: f"the optimizer is {given.kind}" if given.kind in OF_ALL_WEIGHTS else "",
        "its step depends on all weights of a rank, and each rank has different experts",
        "use another, as AdamW",
    ),
    Refusal(
        "max_grad_norm of an optimizer (apex's FusedLAMB has 1.0 by default)",
        _clips,
        "it would clip by the norm of one rank's weights, and each rank has different experts",
        "give it float('inf'), and clip by gradient_clipping of DeepSpeed's JSON, or in plain "
        "PyTorch by clip_grad_norm_ of the object that attach returns",
    ),
    Refusal(
        f"{_names(OF_WHOLE_WEIGHTS, OF_ROWS_AND_COLUMNS)} at ZeRO 1 to 3 (but "
        "optimizer.type muon), or where ranks split experts",
        _looks_at_parts,
        "it takes norms of whole weights, but would see parts of them",
        "use ZeRO stage 0 and expert_sharding_size 1, or an optimizer such as AdamW",
    ),
    *BY_ELEMENTS,
    Refusal(
        "apex's FusedAdam at ZeRO 3",
        _counts_by_group,
        "it counts steps per group, and ZeRO 3 steps the dense weights and the experts of a "
        "group separately",
        "use optimizer.type AdamW of DeepSpeed's JSON, torch.optim.AdamW, or ZeRO stage 0 to 2",
    ),
)


def check_kind(stepping: Stepping) -> None:
    """Raises ValueError where an optimizer that is to step experts would not do what it does
    without us."""
    refuse(OPTIMIZERS, stepping, ENABLED)
    is_known = stepping.kind in ELEMENT_BY_ELEMENT
    if stepping.cut and not is_known and is_first():
        warnings.warn(
            f"ds_moe_ext does not know the optimizer {'.'.join(stepping.source)}: "
            f"{stepping.cut}, so results are correct only if it treats each element of a "
            "weight separately",
            stacklevel=2,
        )


@dataclass(frozen=True)
class Reduced:
    """Elements of dense gradients by where they were reduced."""

    within_moe: int = 0  # in the window of an MoE part
    beside_dense: int = 0  # beside what the host computes between two MoE layers
    tail: int = 0  # at the end of backward
    num_slices: int = 0  # pieces in which those that are not the tail travelled

    def __add__(self, other: Reduced) -> Reduced:
        pairs = zip(vars(self).values(), vars(other).values())
        return Reduced(*(mine + its for mine, its in pairs))

    @property
    def elements(self) -> int:
        return self.within_moe + self.beside_dense + self.tail


def check_slice(elements: int) -> None:
    """Raises ValueError where a plan asks for less than nothing: gradients would be taken twice."""
    if elements < 0:
        raise ValueError(
            f"a plan asks for a slice of {elements} dense gradients; slices (reductions of a Plan) "
            "have 0 elements or more: mend the strategy, or let its slices_gradients be False"
        )
