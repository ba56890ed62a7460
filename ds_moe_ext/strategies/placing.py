"""Strategies that decide where experts compute, and leave to others how rows travel."""

from __future__ import annotations

from abc import abstractmethod

from ds_moe_ext.moe import wires
from ds_moe_ext.moe.wires import Beside
from ds_moe_ext.schedule.task import Schedule
from ds_moe_ext.strategies.base import Site, Strategy


class Placing(Strategy):
    """A strategy that pipelines can be laid over. By itself it sends the rows all at once."""

    @abstractmethod
    def beside(self, site: Site) -> Beside:
        """What goes on beside the rows of a layer. Pure."""

    def schedules(self, site: Site, *, gated: bool) -> tuple[Schedule, Schedule]:
        return wires.programs(site.layer, gated=gated, beside=self.beside(site))
