# SPDX-License-Identifier: Apache-2.0
"""How a host keeps one weight of all experts of a layer: as one parameter, or one for each expert.

Shape letters: E experts, U unused ones, F an expert's own first dim, Q its second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

Place = int | slice | tuple[slice, ...] | None
"""Where an expert's weight lies in a parameter, as an index of it; None: it is all of it."""


class Stored(Protocol):
    """Where a weight of all experts is in the host's module, and what it is called there.

    ``InOne`` and ``OneEach`` are there; a class of one's own needs these methods. ``module`` is the
    experts module that was registered, names are from it.
    """

    def first(self, module: nn.Module) -> Tensor:
        """The first expert's weight, ``[F, ...]``, apart from any graph."""
        ...

    def whole(self, module: nn.Module) -> Tensor:
        """The weight of all experts, ``[E, F, ...]``, apart from any graph."""
        ...

    def of(self, module: nn.Module, expert: int) -> nn.Parameter:
        """The parameter that has it of one expert, maybe with that of others."""
        ...

    def place(self, module: nn.Module, expert: int) -> Place:
        """Where the expert's lies in that parameter."""
        ...

    def exported(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the host's state, from the weight of all experts ``[E, F, ...]``."""
        ...


@dataclass(frozen=True)
class InOne(Stored):
    """In one parameter, with the experts as first dim: ``[E, F, ...]``, or ``[E + U, F, ...]``.

    Attributes:
        name: of the parameter, dotted where it is of a module within.
        num_experts: ``E``, that have a weight; None: as many as it has. Needed with the next two.
        num_unused: ``U``, more of them behind these, which nothing computes with: zeros in a state.
        is_flat: experts lie one below the other without a dim of their own: ``[E * F, ...]``.

    Raises:
        ValueError: the number of experts is not told where the parameter does not say it.
    """

    name: str
    num_experts: int | None = None
    num_unused: int = 0
    is_flat: bool = False

    def __post_init__(self) -> None:
        if self.num_experts is None and (self.num_unused or self.is_flat):
            raise ValueError(
                f"InOne({self.name!r}) does not say how many experts its parameter has a weight "
                "of, which its shape does not tell with num_unused or is_flat; give num_experts"
            )

    def first(self, module: nn.Module) -> Tensor:
        return self.whole(module)[0]

    def whole(self, module: nn.Module) -> Tensor:
        weight = module.get_parameter(self.name).detach()
        if self.is_flat and self.num_experts:
            weight = weight.unflatten(0, (self.num_experts, -1))
        return weight[: self.num_experts]

    def of(self, module: nn.Module, expert: int) -> nn.Parameter:
        return module.get_parameter(self.name)

    def place(self, module: nn.Module, expert: int) -> Place:
        if not self.is_flat:
            return expert
        size = self.first(module).shape[0]
        return slice(expert * size, (expert + 1) * size)

    def exported(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        if self.num_unused:
            whole = torch.cat([whole, whole.new_zeros(self.num_unused, *whole.shape[1:])])
        yield self.name, whole.flatten(0, 1) if self.is_flat else whole


@dataclass(frozen=True)
class InTurns(Stored):
    """In the columns of one matrix, in turns: column ``q * E + e`` of ``[F, Q * E]`` is column
    ``q`` of expert ``e``.

    Attributes:
        name: as of ``InOne``.
        num_experts: ``E``.
    """

    name: str
    num_experts: int

    def first(self, module: nn.Module) -> Tensor:
        return self.whole(module)[0]

    def whole(self, module: nn.Module) -> Tensor:
        weight = module.get_parameter(self.name).detach()
        return weight.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)

    def of(self, module: nn.Module, expert: int) -> nn.Parameter:
        return module.get_parameter(self.name)

    def place(self, module: nn.Module, expert: int) -> Place:
        return slice(None), slice(expert, None, self.num_experts)

    def exported(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield self.name, whole.permute(1, 2, 0).flatten(1)


@dataclass(frozen=True)
class OneEach(Stored):
    """One parameter for each expert, ``[F, ...]``, all of one shape and type.

    Attributes:
        names: of the parameters, in the order of the experts' numbers; dotted where they are of
            modules within, as ``"0.up.weight"``.
    """

    names: tuple[str, ...]

    def first(self, module: nn.Module) -> Tensor:
        return self.of(module, 0).detach()

    def whole(self, module: nn.Module) -> Tensor:
        return torch.stack([module.get_parameter(name).detach() for name in self.names])

    def of(self, module: nn.Module, expert: int) -> nn.Parameter:
        return module.get_parameter(self.names[expert])

    def place(self, module: nn.Module, expert: int) -> Place:
        return None

    def exported(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from zip(self.names, whole)
