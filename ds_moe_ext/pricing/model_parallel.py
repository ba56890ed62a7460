# SPDX-License-Identifier: Apache-2.0
"""Over which ranks one copy of the dense weights, and one micro-batch, are divided. Pure.

As Megatron-core lays ranks out: those of a tensor parallel group are neighbours, then come context,
data and, outermost, pipeline parallelism, so that a stage's ranks follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelParallel:
    """Sizes of tensor, context and pipeline parallelism.

    Attributes:
        tensor: ranks that divide dense weights and, by sequence parallelism, the tokens between.
        context: ranks that divide each sample.
        pipeline: stages that divide the layers.
        chunks: of each stage, which interleave where there are more than one.
        first_layers: of the first stage, where it has another number than those between.
        last_layers: of the last one, likewise.

    Raises:
        ValueError: sizes below 1, or chunks of a single stage.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    chunks: int = 1
    first_layers: int | None = None
    last_layers: int | None = None

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size is not None and size < 1:
                raise ValueError(f"{name} of model parallelism is {size}; give at least 1")
        if self.chunks > 1 and self.pipeline == 1:
            raise ValueError(
                f"each stage has {self.chunks} chunks, but there is one stage; give more stages, "
                "or one chunk"
            )

    @property
    def is_any(self) -> bool:
        """Whether anything is divided."""
        return self.tensor * self.context * self.pipeline > 1

    @property
    def sharers(self) -> int:
        """Ranks of a stage that share each micro-batch."""
        return self.tensor * self.context

    @property
    def size(self) -> int:
        """Ranks of one copy of the dense weights, with those that share its samples."""
        return self.sharers * self.pipeline

    def layers(self, num_layers: int) -> list[list[range]]:
        """Layers of each chunk, ``[stage][chunk]``: the first chunks of all stages, in their order,
        then the second ones.

        Raises:
            ValueError: layers do not divide.
        """
        sizes = [size // self.chunks for size in self._stage_sizes(num_layers)]
        rounds = sum(sizes)
        begins = [sum(sizes[:stage]) for stage in range(self.pipeline)]
        return [
            [
                range(chunk * rounds + begin, chunk * rounds + begin + size)
                for chunk in range(self.chunks)
            ]
            for begin, size in zip(begins, sizes)
        ]

    def _stage_sizes(self, num_layers: int) -> list[int]:
        ends = [self.first_layers, *[None] * (self.pipeline - 2), self.last_layers]
        named = [size for size in ends[: self.pipeline] if size is not None]
        left, stages = num_layers - sum(named), self.pipeline - len(named)
        if left < stages or left % max(stages, 1) or (left and not stages):
            less = " but for those of its first and last one" if named else ""
            raise ValueError(
                f"{num_layers} layers do not divide over {self.pipeline} pipeline stages{less}; "
                "give another number of stages, or layers of the first and the last one by "
                "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
            )
        sizes = [left // stages if size is None else size for size in ends[: self.pipeline]]
        if any(size % self.chunks for size in sizes):
            raise ValueError(
                f"a pipeline stage's layers, {', '.join(map(str, dict.fromkeys(sizes)))}, do not "
                f"divide into {self.chunks} chunks; give another number of virtual stages"
            )
        return sizes


ALONE = ModelParallel()
"""Each rank has all dense weights and samples of its own."""
