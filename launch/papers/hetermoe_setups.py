# SPDX-License-Identifier: Apache-2.0
"""The clusters and models that HeterMoE was measured on, as far as the paper says, and its figures.

Section 6.1 and figures 2 and 7 to 12, table 3. What is not in it is assumed, and named in
``ASSUMED``. Seconds are of one token, one layer, forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_moe_ext.core.hardware import Link
from ds_moe_ext.planning.zebra_costs import MoeModel, RankClass, TwoClasses

GIB = 2**30
KI = 2**10  # tokens
ROCE = Link(bytes_per_s=12.5e9)  # 100 Gb/s for each GPU
AWS = Link(bytes_per_s=25e9)  # as the authors simulated it
PCIE = Link(bytes_per_s=25e9)

# Table 3, as the spec derives it: attention over experts is 0.62 at 8K tokens and 0.88 at 16K, and
# sending takes 0.155 of experts, all for D1 on an A40 for each V100.
SENT = 0.155
MATRICES = 0.36  # of attention: what is linear in the length
SCORES = 0.26  # the rest, at 8K
EXPERTS_S = 2 * 1024 * 2 / ROCE.bytes_per_s / SENT  # a token's two experts of width 1024, V100
WIDER = 1.41  # efficiency of matrix products of width 2048 over those of 1024
LOST = 0.93  # of a step is what is simulated
A40_FLOPS = 149.7e12
MEMORY_SHARE = 0.75  # of a device's, for weights of experts with gradients and optimizer
WEIGHT_BYTES = 16
SHARED_BYTES = 12  # of those, what pipelines share (ZeRO 1)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A GPU.

    Attributes:
        memory_bytes: of it.
        speed: by datasheet, in A40s: a newer GPU is as efficient as that.
        matrices: times as slow as that, in what of attention is linear in the length.
        scores: in the rest of attention.
        experts: in experts.
    """

    memory_bytes: int
    speed: float = 1.0
    matrices: float = 1.0
    scores: float = 1.0
    experts: float = 1.0

    def ranks(self, model: MoeModel, *, weight_bytes: float = WEIGHT_BYTES) -> RankClass:
        """What a token costs it."""
        wide = model.width / 1024
        product = wide**2 / (WIDER if wide > 1 else 1.0)
        scores = SCORES * wide * model.length / (8 * KI)
        seconds = EXPERTS_S / V100_EXPERTS / self.speed
        attention = MATRICES * product * self.matrices + scores * self.scores
        room = MEMORY_SHARE * self.memory_bytes // (model.expert_weights * weight_bytes)
        return RankClass(
            attention_s=EXPERTS_S / self.speed * attention,
            expert_s=seconds * product * self.experts,
            room=int(room),
        )


V100_EXPERTS = 1.25  # figure 2a
A40 = Kind(memory_bytes=48 * GIB)
V100 = Kind(memory_bytes=16 * GIB, scores=4.17, experts=V100_EXPERTS)
A100 = Kind(memory_bytes=80 * GIB, speed=312e12 / A40_FLOPS)
L40S = Kind(memory_bytes=48 * GIB, speed=362e12 / A40_FLOPS)
T4 = Kind(
    memory_bytes=16 * GIB, speed=362e12 / A40_FLOPS, matrices=8.2, scores=14.5, experts=7.0
)  # figure 2b


@dataclass(frozen=True)
class Shape:
    """A model of table 2: layers, width, experts."""

    num_layers: int
    width: int
    num_experts: int

    def model(self, length: int, *, num_experts: int | None = None) -> MoeModel:
        """With samples of so many tokens."""
        return MoeModel(
            num_layers=self.num_layers,
            num_experts=num_experts or self.num_experts,
            top_k=2,
            width=self.width,
            expert_width=7 * self.width // 2,
            length=length,
            kv_share=0.25,
        )


MODELS: Mapping[str, Shape] = {
    "W1": Shape(4, 2048, 12),
    "W2": Shape(4, 2048, 24),
    "D1": Shape(8, 1024, 24),
    "D2": Shape(6, 1024, 18),
    "D3": Shape(8, 1024, 40),
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One of table 1: so many ranks of each kind."""

    name: str
    new: Kind
    new_ranks: int
    old: Kind
    old_ranks: int
    link: Link

    def classes(self, model: MoeModel, *, weight_bytes: float = WEIGHT_BYTES) -> TwoClasses:
        """Both kinds; bytes are those of a weight."""
        return TwoClasses(
            model=model,
            new=self.new.ranks(model, weight_bytes=weight_bytes),
            old=self.old.ranks(model, weight_bytes=weight_bytes),
            link=self.link,
        )


def on_premise(name: str, new_ranks: int, old_ranks: int) -> Cluster:
    """A40s and V100s."""
    return Cluster(
        name=name, new=A40, new_ranks=new_ranks, old=V100, old_ranks=old_ranks, link=ROCE
    )


O1, O2, O3 = on_premise("O1", 6, 6), on_premise("O2", 4, 8), on_premise("O3", 6, 3)
C1 = Cluster(name="C1", new=L40S, new_ranks=2, old=T4, old_ranks=6, link=AWS)
C2 = Cluster(name="C2", new=L40S, new_ranks=2, old=T4, old_ranks=8, link=AWS)

LENGTHS = tuple(KI * length for length in (4, 8, 12, 16, 20, 24, 28, 32))
FIGURE_7 = (("W1", O1), ("W2", O1), ("D1", O1), ("W2", O2), ("D1", O2), ("D2", O3))
FIGURE_8 = (("W2", C1), ("D1", C1), ("D3", C2))
FIGURE_9 = tuple((name, cluster) for name, cluster in FIGURE_7 if cluster in (O1, O2))

ASSUMED = (
    "D1 on an A40 for each V100 (table 3): of a V100's seconds for experts, attention takes "
    f"{MATRICES} + {SCORES} (length / 8K) on an A40, an all-to-all {SENT}; a V100's card carries "
    f"12.5 GB/s, so that its experts take {1e6 * EXPERTS_S:.2f} us a token and layer",
    "V100: experts 1.25 times as slow as on an A40 (figure 2a); what is linear in the length as "
    "fast as there (no figure says; its memory is faster, its products slower), the rest 4.17 "
    "times as slow, so that all attention is 3.7 times as slow at 64K",
    "L40S, A100: as efficient as an A40, by datasheet 2.42 and 2.08 times as fast; T4: experts 7.0 "
    "times as slow as L40S, attention 9.9 times at 4K and 13.6 times at 64K (figure 2b)",
    f"matrix products of width 2048 are {WIDER} times as efficient as those of 1024, so that W1's "
    "attention meets its experts at 28K (figure 12)",
    "no head, no optimizer; backward takes three times as long as forward (activations are "
    "computed again)",
    "EP computes all it sends in one chunk and repeats the exchange when it computes a layer "
    "again, as DeepSpeed's checkpointing of whole layers does; zebra and DistEP repeat none; "
    "DistEP's all-to-alls are in the best of 1, 2 and 4 chunks (section 6.1)",
    f"three quarters of a device's memory are for experts, {WEIGHT_BYTES} bytes a weight; "
    f"pipelines share {SHARED_BYTES} of these",
    "the setups of figures 7 to 9 are those where the numbers of GPUs divide the experts (the "
    "paper does not name all)",
)
