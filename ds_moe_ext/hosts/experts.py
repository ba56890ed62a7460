"""Experts modules of a host: found, described, and replaced by one that keeps this rank's share.

The contract of the call is Hugging Face's since version 5: ``experts(hidden [T, D], expert ids
[T, K], scores [T, K]) -> [T, D]``. Only the experts are replaced, so the host's routers, losses,
shared experts and parameter names stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from ds_moe_ext.hosts.found import Adopted, Found, set_module
from ds_moe_ext.moe.expert import ExpertFunction
from ds_moe_ext.moe.layer import RoutedExperts


@dataclass(frozen=True, eq=False)
class ExpertsDescription:
    """What one experts module holds and computes.

    Attributes:
        num_experts: experts ``E``.
        weight_names: its parameters, each with the experts as first dim, in the order that
            ``function`` takes them.
        function: ``(rows by slot, rows of each slot, weights) -> rows``.
    """

    num_experts: int
    weight_names: tuple[str, ...]
    function: ExpertFunction


Describe = Callable[[nn.Module], ExpertsDescription]
_DESCRIBE: dict[type, Describe] = {}


def register_experts(cls: type[nn.Module]) -> Callable[[Describe], Describe]:
    """Tell how to replace an experts module of the user's own; see ``ExpertsDescription``.

    ``cls`` must be called as ``experts(hidden, expert_ids, scores)``::

        @register_experts(MyExperts)
        def describe(experts):
            return ExpertsDescription(
                experts.num_experts, ("up", "down"), FeedForwardExperts(silu_gated))
    """

    def add(describe: Describe) -> Describe:
        _DESCRIBE[cls] = describe
        return describe

    return add


def find_registered(model: nn.Module) -> Iterator[Found]:
    """The modules of registered classes, in model order."""
    for name, module in model.named_modules():
        describe = _DESCRIBE.get(type(module))
        if describe is not None:
            yield found_experts(model, name, module, describe(module))


def found_experts(
    model: nn.Module, name: str, module: nn.Module, description: ExpertsDescription
) -> Found:
    """A layer to replace, from a module and its description."""

    def adopt(held: Tensor, routed_of: Callable[[ExpertFunction], RoutedExperts]) -> Adopted:
        hosted = HostedExperts(module, description, held, routed_of(description.function))
        set_module(model, name, hosted)
        sources = {
            hosted.get_parameter(weight): (module.get_parameter(weight),)
            for weight in description.weight_names
        }
        return Adopted(hosted.routed, sources, tuple(module.parameters()))

    return Found(name, type(module).__name__, description.num_experts, 1, False, adopt)


class HostedExperts(nn.Module):
    """This rank's experts under the host's parameter names, run by a strategy.

    Args:
        source: the host's module; its weights are copied, it is not kept.
        description: what it holds.
        held: experts that this rank is home to, int64 ``[S]``, in slot order.
        routed: the program of the layer.
    """

    def __init__(
        self,
        source: nn.Module,
        description: ExpertsDescription,
        held: Tensor,
        routed: RoutedExperts,
    ) -> None:
        super().__init__()
        self.num_experts = description.num_experts
        self.weight_names = description.weight_names
        self.routed = routed
        for name in description.weight_names:
            weight = source.get_parameter(name)
            own = weight.detach().index_select(0, held.to(weight.device)).clone()
            parameter = nn.Parameter(own, requires_grad=weight.requires_grad)
            parameter.__dict__.update(weight.__dict__)  # marks that optimizers look at
            self.register_parameter(name, parameter)
        self.train(source.training)

    def weights(self) -> tuple[Tensor, ...]:
        """The weights of this rank's experts, slot first."""
        return tuple(self.get_parameter(name) for name in self.weight_names)

    def forward(self, hidden: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., D]``. Collective over the cells."""
        self.routed.rows.begin(is_training=self.training)
        x_TD = hidden.reshape(-1, hidden.shape[-1])
        y_TD = self.routed(x_TD, expert_ids.long(), scores, self.weights())
        return y_TD.view_as(hidden)


def shell(module: nn.Module) -> nn.Module:
    """The module without its parameters: its methods and settings go on working, and the weights
    that were there may be freed."""
    empty = copy.copy(module)
    empty.__dict__ = dict(module.__dict__)
    empty._parameters = dict.fromkeys(module._parameters)
    return empty
