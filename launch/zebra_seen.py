"""What the ranks of bench_zebra.py did in a step: who computed, and when nobody did.

Pure. Moments are of one clock, for all ranks are on one machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from links_seen import Moments, bare, union


@dataclass(frozen=True)
class Step:
    """A step on one rank.

    Attributes:
        start_s: when it began.
        end_s: when it ended.
        computed: when attention or experts did, in order.
        late_s: by how much the machine let that last longer.
        loss: of the rank's own batch.
    """

    start_s: float
    end_s: float
    computed: tuple[Moments, ...]
    late_s: float
    loss: float


@dataclass(frozen=True)
class Shared:
    """A step on all ranks.

    Attributes:
        seconds: from the first rank's start to the last one's end.
        use_C: share of that in which each rank computed.
        idle_s: nobody computed: what travelled and what the host did was exposed.
        late_s: see ``Step``, mean over the ranks.
    """

    seconds: float
    use_C: tuple[float, ...]
    idle_s: float
    late_s: float

    @classmethod
    def of(cls, ranks: Sequence[Step]) -> Shared:
        """Args: ranks: the same step on each."""
        start_s = min(step.start_s for step in ranks)
        end_s = max(step.end_s for step in ranks)
        seconds = end_s - start_s
        return cls(
            seconds=seconds,
            use_C=tuple(_covered(step.computed) / seconds for step in ranks),
            idle_s=bare(start_s, end_s, union(span for step in ranks for span in step.computed)),
            late_s=sum(step.late_s for step in ranks) / len(ranks),
        )


def _covered(spans: Iterable[Moments]) -> float:
    return sum(end - start for start, end in union(spans))
