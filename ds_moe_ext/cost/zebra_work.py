# SPDX-License-Identifier: Apache-2.0
"""What a zebra group is priced with: a model, ranks of two classes, the cards between them. Pure.

HeterMoE's simulator (section 6.4.1, spec 2.9). Work is counted a token and layer, in forward, so
that seconds of any cut of the tokens follow by multiplication. Shape letter: C ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.hardware import Device, Hardware, Link

EXPERT_PRODUCTS = 3  # matrix products of an expert: Mixtral's


@dataclass(frozen=True, kw_only=True)
class MoeModel:
    """A stack of equal layers, all of them with experts.

    Attributes:
        num_layers: their number.
        num_experts: of a layer.
        top_k: experts of a token.
        width: of the model.
        expert_width: of an expert's hidden layer.
        length: tokens of a sample.
        kv_share: key and value heads, as a share of the query heads.
        element_bytes: of a number that travels.
    """

    num_layers: int
    num_experts: int
    top_k: int
    width: int
    expert_width: int
    length: int
    kv_share: float = 1.0
    element_bytes: float = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k is {self.top_k}, but a layer has {self.num_experts} experts; a token takes "
                "each once at most: lower top_k"
            )

    @property
    def attention_work(self) -> float:
        """Multiply-adds of a token: four matrices, and scores and sums over what came before it."""
        matrices = (2 + 2 * self.kv_share) * self.width**2
        return matrices + self.length * self.width

    @property
    def expert_weights(self) -> int:
        """Of one expert."""
        return EXPERT_PRODUCTS * self.width * self.expert_width

    @property
    def expert_work(self) -> float:
        """Multiply-adds of a token, in all its experts."""
        return self.top_k * self.expert_weights

    @property
    def sent_bytes(self) -> float:
        """Of a token's rows, one way."""
        return self.top_k * self.width * self.element_bytes


@dataclass(frozen=True, kw_only=True)
class RankClass:
    """Ranks with one kind of device, by what a token costs them in forward.

    Attributes:
        attention_s: seconds of one layer but for its experts.
        expert_s: seconds of its experts in one layer.
        head_s: seconds of what follows the last layer; it is not computed again for backward.
        room: experts, of all layers, that a rank has memory for; None: any number.
    """

    attention_s: float
    expert_s: float
    head_s: float = 0.0
    room: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be finite and at least 0")

    @classmethod
    def of(
        cls,
        device: Device,
        model: MoeModel,
        *,
        number_type: str,
        attention_efficiency: float,
        expert_efficiency: float,
        room: int | None = None,
    ) -> RankClass:
        """What a device's matrix products make of the model's work.

        Args:
            device: of a hardware file.
            model: whose work it is.
            number_type: a name of ``hardware.Flops``.
            attention_efficiency: the share of the device's rate that attention reaches.
            expert_efficiency: and experts.
            room: as the attribute.

        Raises:
            ValueError: the file has no such rate, or an efficiency is not above 0.
        """
        product = device.product(number_type)
        if product is None:
            raise ValueError(
                f"device {device.name!r} has no rate for number_type {number_type!r}; add it to "
                "flops_per_s of its file, or give attention_s and expert_s"
            )
        for name, share in (("attention", attention_efficiency), ("expert", expert_efficiency)):
            if not 0 < share < math.inf:
                raise ValueError(f"{name}_efficiency is {share}; it must be above 0")
        rate = product.multiply_adds_per_s
        return cls(
            attention_s=model.attention_work / (rate * attention_efficiency),
            expert_s=model.expert_work / (rate * expert_efficiency),
            room=room,
        )


@dataclass(frozen=True, kw_only=True)
class TwoClasses:
    """What a shape of a zebra group, or a rival, is priced on.

    Attributes:
        model: that is trained.
        new: ranks that attention is fast on.
        old: the others.
        link: of one rank's network card, one direction.
        backward: how many times as long as forward computing takes in backward: 3 where
            activations are computed again, else 2.
    """

    model: MoeModel
    new: RankClass
    old: RankClass
    link: Link
    backward: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.backward < math.inf:
            raise ValueError(f"backward is {self.backward}; it must be above 0, such as 2 or 3")


def card_of(hardware: Hardware) -> Link:
    """A rank's share of what its node sends to others.

    Raises:
        ValueError: the file does not say.
    """
    if hardware.inter is None:
        raise ValueError(
            f"hardware {hardware.name!r} does not say what a node sends to others; add the key "
            "'inter' to its file, or give the link"
        )
    return Link(
        bytes_per_s=hardware.inter.bytes_per_s / hardware.ranks_per_node,
        latency_s=hardware.inter.latency_s,
    )


def all_to_all_s(bytes_CC: np.ndarray, link: Link) -> float:
    """An all-to-all as sends and receives, one after the other on each card (spec rule 39).

    A card sends and receives at once; the busiest card counts. What a rank keeps is on no card, and
    nothing is sent where there are no bytes.

    Args:
        bytes_CC: from each rank to each other, ``[C, C]``.
        link: of one card.
    """
    travels_CC = (bytes_CC > 0) & ~np.eye(len(bytes_CC), dtype=bool)
    seconds_CC = np.where(travels_CC, link.latency_s + bytes_CC / link.bytes_per_s, 0.0)
    return float(max(seconds_CC.sum(axis=0).max(), seconds_CC.sum(axis=1).max()))
