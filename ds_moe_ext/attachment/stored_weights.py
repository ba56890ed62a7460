# SPDX-License-Identifier: Apache-2.0
"""How a host keeps one weight of all experts of a layer: as one parameter, or one for each expert.

Shape letter: E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


class Stored(Protocol):
    """Where a weight of all experts is in the host's module, and what it is called there."""

    def first(self, module: nn.Module) -> Tensor:
        """Of the first expert."""
        ...

    def whole(self, module: nn.Module) -> Tensor:
        """Of all experts, ``[E, ...]``, apart from any graph."""
        ...

    def of(self, module: nn.Module, expert: int) -> nn.Parameter:
        """The parameter that has it of one expert."""
        ...

    def place(self, module: nn.Module, expert: int) -> int | slice | None:
        """Where the expert's lies in that parameter; None: it is all of it."""
        ...

    def exported(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the host's state, from those of all experts."""
        ...


@dataclass(frozen=True)
class InOne(Stored):
    """In one parameter, with the experts as first dim.

    Attributes:
        name: of the parameter.
        num_experts: that have a weight; None: as many as it has.
        num_unused: more of them in the parameter, which nothing computes with: zeros in a state.
        is_flat: the experts' own first dim follows theirs without a dim between: ``[E * F, ...]``.
    """

    name: str
    num_experts: int | None = None
    num_unused: int = 0
    is_flat: bool = False

    def first(self, module: nn.Module) -> Tensor:
        return self.whole(module)[0]

    def whole(self, module: nn.Module) -> Tensor:
        weight = module.get_parameter(self.name).detach()
        if self.is_flat and self.num_experts is not None:
            weight = weight.unflatten(0, (self.num_experts, -1))
        return weight[: self.num_experts]

    def of(self, module: nn.Module, expert: int) -> nn.Parameter:
        return module.get_parameter(self.name)

    def place(self, module: nn.Module, expert: int) -> int | slice | None:
        if not self.is_flat:
            return expert
        size = self.first(module).shape[0]
        return slice(expert * size, (expert + 1) * size)

    def exported(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        if self.num_unused:
            whole = torch.cat([whole, whole.new_zeros(self.num_unused, *whole.shape[1:])])
        yield self.name, whole.flatten(0, 1) if self.is_flat else whole


@dataclass(frozen=True)
class OneEach(Stored):
    """One parameter for each expert.

    Attributes:
        names: of the parameters, by the experts' numbers.
    """

    names: tuple[str, ...]

    def first(self, module: nn.Module) -> Tensor:
        return self.of(module, 0).detach()

    def whole(self, module: nn.Module) -> Tensor:
        return torch.stack([module.get_parameter(name).detach() for name in self.names])

    def of(self, module: nn.Module, expert: int) -> nn.Parameter:
        return module.get_parameter(self.names[expert])

    def place(self, module: nn.Module, expert: int) -> int | slice | None:
        return None

    def exported(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from zip(self.names, whole)
