# SPDX-License-Identifier: Apache-2.0
"""What the dense parts of layers send, under tensor and context parallelism. Pure.

Tensor parallel ranks gather the tokens of all before attention and before an MLP, and scatter sums
behind both: adjoints of each other, so that backward sends as much. Weights' gradients want the
tokens again: they are gathered beside products, and not counted. Context parallel ranks pass keys
and values round a ring; each turn of it hides behind the attention to those of the turn before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_moe_ext.cost.block_costs import BACKWARD, FORWARD
from ds_moe_ext.cost.lines import Line
from ds_moe_ext.cost.pipeline_lines import described_line
from ds_moe_ext.hardware import Hardware
from ds_moe_ext.pricing.model_shape import ModelShape
from ds_moe_ext.pricing.training_shape import Training


@dataclass(frozen=True, kw_only=True)
class DenseTraffic:
    """Of one rank in one pass.

    Attributes:
        hardware: as it is reckoned with.
        shape: of the model.
        training: how.
        multiply_adds_per_s: of attention.

    Raises:
        ValueError: what the hardware file does not say.
    """

    hardware: Hardware
    shape: ModelShape
    training: Training
    multiply_adds_per_s: float

    def forward_s(self, layers: Sequence[int]) -> float:
        """Of some layers."""
        return sum(map(self._tensor_s, layers)) + len(layers) * self._ring_s(FORWARD)

    def backward_s(self, layers: Sequence[int]) -> float:
        """Of the same, forward once more where they run again."""
        back_s = sum(map(self._tensor_s, layers)) + len(layers) * self._ring_s(BACKWARD)
        return back_s + self.forward_s(layers) if self.training.recomputes else back_s

    @property
    def embedding_s(self) -> float:
        """Each way: sums of its parts are scattered."""
        return self._collective_s("reduce_scatter", self.shape.width)

    @property
    def head_s(self) -> float:
        """Each way: tokens are gathered for the parts of the head."""
        return self._collective_s("all_gather", self.shape.width)

    def _tensor_s(self, layer: int) -> float:
        shape = self.shape
        has_mlp = shape.shared_width if layer in shape.moe_layers else shape.dense_width
        gathered = [
            *(shape.divided.gathered_widths or (shape.width,)),
            *[shape.width] * bool(has_mlp),
        ]
        scattered = [shape.width] * (2 if has_mlp else 1)
        return sum(self._collective_s("all_gather", width) for width in gathered) + sum(
            self._collective_s("reduce_scatter", width) for width in scattered
        )

    def _collective_s(self, what: str, width: int) -> float:
        """Of so many numbers of each token of the group."""
        size = self.training.parallel.tensor
        line = described_line(self.hardware, what, size, num_members=size)
        num_bytes = size * self.training.tokens * width * self.training.element_bytes
        return line.alpha_s + line.beta_s * num_bytes

    def _ring_s(self, rounds: int) -> float:
        """What attention does not hide: backward computes twice as much, and passes gradients of
        keys and values on with these."""
        parallel, training, shape = self.training.parallel, self.training, self.shape
        if parallel.context == 1:
            return 0.0
        line = passing_line(self.hardware, parallel.sharers, parallel.tensor)
        width = shape.divided.key_value_width or sum(shape.head_width)
        turn_s = line.beta_s * training.tokens * width * training.element_bytes
        work = training.tokens * shape.attention_work(training.length) / parallel.context
        hidden_s = work / self.multiply_adds_per_s
        turns = parallel.context - 1
        return turns * max(line.alpha_s + rounds * (turn_s - hidden_s), 0.0)


def passing_line(hardware: Hardware, num_ranks: int, at_once: int) -> Line:
    """By bytes that one rank sends to its next one in a ring.

    Args:
        hardware: the cluster.
        num_ranks: neighbours over which the ring goes; beyond a node it meets the slow links.
        at_once: of a node's ranks that send to another node at the same time, at most.

    Raises:
        ValueError: what the file does not say.
    """
    if num_ranks <= hardware.ranks_per_node:
        link, sharers = hardware.intra or hardware.copy_link(num_ranks), 1
    else:
        link = hardware.inter or hardware.copy_link(num_ranks)
        sharers = min(hardware.ranks_per_node, at_once)
    return Line(alpha_s=link.latency_s, beta_s=sharers / link.bytes_per_s)
