# SPDX-License-Identifier: Apache-2.0
"""What a cluster reaches of its datasheet, where nobody has measured it. Pure.

Peaks of matrix products and links are never reached. Where a hardware file has measured lines these
stand as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ds_moe_ext.hardware import Device, Flops, Hardware, Link, Product, Products


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Assumptions, to be told with every price that rests on them.

    Attributes:
        products: part of a device's peak that matrix products reach.
        memory: part of the rate of its memory.
        links: part of a link's rate.
        start_s: seconds until a transfer begins, where the file states none.
        passes: how often a layer's dense part reads or writes a token's hidden state in memory,
            besides what its matrix products do: norms, residuals, rotations, activations.

    Raises:
        ValueError: a part that is none.
    """

    products: float = 0.6
    memory: float = 0.8
    links: float = 0.8
    start_s: float = 15e-6
    passes: int = 16

    def __post_init__(self) -> None:
        for name in ("products", "memory", "links"):
            if not 0 < vars(self)[name] <= 1:
                raise ValueError(f"{name} is {vars(self)[name]}; a part is above 0, at most 1")

    def of(self, hardware: Hardware) -> Hardware:
        """The cluster as it is reckoned with."""
        device = hardware.device
        rate = device.memory_bytes_per_s
        return replace(
            hardware,
            device=replace(
                device,
                memory_bytes_per_s=None if rate is None else self.memory * rate,
                products=self._products(device),
                flops_per_s=Flops(),
            ),
            intra=self._link(hardware.intra),
            inter=self._link(hardware.inter),
        )

    def _products(self, device: Device) -> Products:
        lines = {}
        for each in fields(Products):
            line = device.product(each.name)
            measured = vars(device.products)[each.name] is not None
            lines[each.name] = line if line is None or measured else self._slower(line)
        return Products(**lines)

    def _slower(self, line: Product) -> Product:
        return replace(line, multiply_adds_per_s=self.products * line.multiply_adds_per_s)

    def _link(self, link: Link | None) -> Link | None:
        if link is None or link.r_squared is not None:
            return link
        return Link(
            bytes_per_s=self.links * link.bytes_per_s, latency_s=link.latency_s or self.start_s
        )
