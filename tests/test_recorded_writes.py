# SPDX-License-Identifier: Apache-2.0
"""Writes into weights of all experts that have no elements, done again for each expert alone, give
what they would have given all together.

Shape letters: E experts, F an expert's own first dim, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.recorded_writes import Unknown, Writes, blank, has_blanks, key_of

CPU = torch.device("cpu")
E, F, D = 5, 4, 6


def each_alone(weight: Tensor, initialize: Callable[[Tensor], None], is_flat: bool) -> Tensor:
    """All experts of a weight on the meta device, one after the other."""
    writes = Writes({key_of(weight)}, set())
    with torch.no_grad(), writes.recording():
        initialize(weight)
    parts = [weight[e * F : e * F + F] if is_flat else weight[e] for e in range(E)]
    made = [writes.recipe(weight, part).made(CPU) for part in parts]
    return torch.cat(made) if is_flat else torch.stack(made)


def random_writes(seed: int, is_flat: bool) -> Callable[[Tensor], None]:
    """Some writes to all of a weight, to some experts, to parts of some, of one, or of all."""

    def initialize(weight: Tensor) -> None:
        rng = np.random.default_rng(seed)
        weight.fill_(-1.0)
        for number in range(6):
            view = weight
            kind = rng.integers(4)
            if is_flat:
                first = int(rng.integers(E)) * F
                if kind == 1:
                    view = weight[first : first + F]
                elif kind == 2:
                    view = weight[first + 1 : first + 3, 2:]
                elif kind == 3:
                    view = weight[first : first + 2 * F]
            elif kind == 1:
                view = weight[int(rng.integers(E))]
            elif kind == 2:
                view = weight[:, 1:3, int(rng.integers(D))]
            elif kind == 3:
                first = int(rng.integers(E))
                view = weight[first : first + 2, :, ::2]
            if rng.integers(2):
                view.fill_(float(number))
            else:
                view.mul_(2.0).add_(1.0)

    return initialize


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_they_are_those_of_all_together(seed: int, is_flat: bool) -> None:
    shape = (E * F, D) if is_flat else (E, F, D)
    together = torch.empty(shape)
    random_writes(seed, is_flat)(together)
    alone = each_alone(torch.empty(shape, device="meta"), random_writes(seed, is_flat), is_flat)
    assert torch.equal(alone, together)


@pytest.mark.parametrize(
    ("initialize", "expected"),
    [
        (lambda weight: None, "^$"),
        (lambda weight: nn.init.orthogonal_(weight, 2.0), "orthogonal_"),
        (lambda weight: weight.copy_(torch.zeros(E, F, D)), "copy_"),
        (lambda weight: weight.transpose(0, 1)[1:3].fill_(1.0), r"a part \[2, 5, 6\]"),
        (lambda weight: weight.add_(torch.zeros(D)), "add_"),
        (lambda weight: torch.eye(D, out=weight[0, :D]), "eye"),
        (lambda weight: torch._foreach_zero_([weight, torch.zeros(3)]), "_foreach_zero_"),
    ],
)
def test_what_is_of_all_together_is_reported(
    initialize: Callable[[Tensor], None], expected: str
) -> None:
    with pytest.raises(Unknown, match=expected):
        each_alone(torch.empty(E, F, D, device="meta"), initialize, is_flat=False)


def test_what_is_there_stays() -> None:
    there, made, empty = torch.zeros(3), torch.zeros(3), torch.empty(3, device="meta")
    writes = Writes({key_of(empty)}, {key_of(there)})
    before = nn.init.orthogonal_, torch.nn.init._no_grad_trunc_normal_
    with writes.recording():
        for tensor in (there, made, empty):
            nn.init.ones_(tensor)
            nn.init.trunc_normal_(tensor)
            tensor.data[0].fill_(7.0)
            torch.arange(3.0, out=tensor)
            tensor[0] = 7.0
    assert (nn.init.orthogonal_, torch.nn.init._no_grad_trunc_normal_) == before
    assert not there.any()
    assert made[0] == 7 and made[1:].tolist() == [1, 2]
    assert [writes.count(tensor) for tensor in (there, made, empty)][::2] == [0, 5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64])
def test_elements_that_nobody_wrote_are_found(dtype: torch.dtype) -> None:
    tensor = torch.empty(4, 5, dtype=dtype)
    blank(tensor)
    assert has_blanks(tensor)
    tensor[:, 1:] = 0
    assert has_blanks(tensor)
    tensor[:, 0] = 1
    assert not has_blanks(tensor)
