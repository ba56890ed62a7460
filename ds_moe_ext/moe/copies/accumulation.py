# SPDX-License-Identifier: Apache-2.0
"""Whether a host still has what earlier backward passes of a step left of experts' gradients.

Gradients of copies wait where they came to be until the last pass of a step. A user who drops what
a host has accumulated, as by ``zero_grad``, drops those of copies too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Accumulation(Protocol):
    """What a host has of one layer's experts that are at home on this rank."""

    def begin(self) -> None:
        """The first pass of a step is about to leave gradients with the host."""
        ...

    def is_kept(self) -> bool:
        """Whether the host still has what passes have left since ``begin``.

        Raises:
            RuntimeError: it has something else.
        """
        ...


class KeptMeanwhile:
    """Of a host that says when it drops what it has: a number is then another.

    Args:
        number: tells it.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self._number, self._begun = number, number()

    def begin(self) -> None:
        """See ``Accumulation``."""
        self._begun = self._number()

    def is_kept(self) -> bool:
        """See ``Accumulation``."""
        return self._number() == self._begun


class KeptInGrad:
    """Of a host that accumulates in ``.grad``, which a user may set to None or to zeros.

    The weight that got a gradient last stands for all of the layer's: users drop all or nothing.
    Where none at home here got any, nothing is known, and nothing is dropped.

    Args:
        layer: its number, for a person.
        weights: gives the parameters that are at home, as they are when it is asked.
    """

    def __init__(self, layer: int, weights: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._layer, self._weights = layer, weights
        self._watched: list[nn.Parameter] = []
        self._hooks: list[RemovableHandle] = []  # of these
        self._seen: tuple[Tensor, int] | None = None  # it, and the version of its gradient

    def begin(self) -> None:
        """See ``Accumulation``. Experts may have moved since the last step."""
        self._seen = None
        weights = [weight for weight in self._weights() if weight.requires_grad]
        if [*map(id, weights)] != [*map(id, self._watched)]:
            for hook in self._hooks:
                hook.remove()
            self._watched = weights
            self._hooks = [w.register_post_accumulate_grad_hook(self._saw) for w in weights]

    def _saw(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self._seen = weight, weight.grad._version

    def is_kept(self) -> bool:
        """See ``Accumulation``. It waits for the device only where gradients were changed."""
        if self._seen is None:
            return True
        weight, version = self._seen
        if weight.grad is None:
            return False
        if weight.grad._version == version:
            return True
        if any(bool(w.grad.any()) for w in self._weights() if w.grad is not None):
            raise RuntimeError(
                f"gradients of experts of layer {self._layer} were changed in the midst of a step "
                "of several backward passes, but those of copied experts wait on other ranks for "
                "the last one, and would not be changed alike: scale losses instead, or change "
                "gradients behind the last backward pass"
            )
        return False
