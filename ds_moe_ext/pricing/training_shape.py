# SPDX-License-Identifier: Apache-2.0
"""How a model is trained, as far as its price depends on it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ds_moe_ext.pricing.model_parallel import ALONE, ModelParallel

ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
MASTER_AND_STATES = 12  # bytes of a weight for Adam: itself and two states, in 32 bits


MOST_PASSES = 100_000  # of a step


@dataclass(frozen=True, kw_only=True)
class Training:
    """One optimizer step of a run.

    Attributes:
        num_ranks: of the run.
        length: tokens of a sample.
        micro_batch: samples in one pass, of a rank or of the ranks that share them.
        micro_batches: passes of a step.
        number_type: in which matrices are multiplied: ``fp32``, ``tf32``, ``fp16`` or ``bf16``.
        zero_stage: as DeepSpeed counts: from 1 ranks divide optimizer states, from 2 gradients,
            from 3 weights. Megatron's distributed optimizer is 1.
        offloaded_states: part of the optimizer's states that lies in host memory, 0 to 1.
        recomputes: layers run again in backward, so that only what passes between them is kept.
        hides_gradients: dense gradients are reduced beside backward by the host itself.
        sums_in_float32: gradients are summed in 32 bits, where they are narrower.
        parallel: tensor, context and pipeline parallelism.

    Raises:
        ValueError: no such training.
    """

    num_ranks: int
    length: int
    micro_batch: int = 1
    micro_batches: int = 1
    number_type: str = "bf16"
    zero_stage: int = 1
    offloaded_states: float = 0.0
    recomputes: bool = False
    hides_gradients: bool = False
    sums_in_float32: bool = False
    parallel: ModelParallel = ALONE

    def __post_init__(self) -> None:
        for name in ("num_ranks", "length", "micro_batch", "micro_batches"):
            if vars(self)[name] < 1:
                raise ValueError(f"{name} is {vars(self)[name]}; give at least 1")
        if self.micro_batches > MOST_PASSES:
            raise ValueError(
                f"micro_batches is {self.micro_batches}, and each is gone through; give at most "
                f"{MOST_PASSES:,}"
            )
        if self.number_type not in ELEMENT_BYTES:
            raise ValueError(
                f"number_type is {self.number_type!r}; choose {', '.join(ELEMENT_BYTES)}"
            )
        self._check_parallel()

    def _check_parallel(self) -> None:
        parallel, stages = self.parallel, self.parallel.pipeline
        if self.num_ranks % parallel.size:
            raise ValueError(
                f"tensor x context x pipeline parallelism is {parallel.tensor} x "
                f"{parallel.context} x {stages}, which does not divide {self.num_ranks} ranks; "
                "give other sizes, or other --nodes"
            )
        halves = 2 * parallel.context if parallel.context > 1 else 1
        if self.length % halves or self.length // parallel.context % parallel.tensor:
            raise ValueError(
                f"samples of {self.length} tokens do not divide over context parallelism "
                f"{parallel.context}, by twice as many, and tensor parallelism {parallel.tensor}; "
                "give another --length"
            )
        rest = self.micro_batches % stages
        if parallel.chunks > 1 and rest:
            raise ValueError(
                f"a step has {self.micro_batches} micro-batches, which {stages} interleaved "
                "pipeline stages do not divide; give more samples a step, or one virtual stage"
            )

    @property
    def stage_ranks(self) -> int:
        """Of one pipeline stage."""
        return self.num_ranks // self.parallel.pipeline

    @property
    def dense_replicas(self) -> int:
        """Ranks of a stage that have the same dense weights, and sum their gradients."""
        return self.stage_ranks // self.parallel.tensor

    @property
    def tokens(self) -> int:
        """Of a rank in one pass."""
        return self.length * self.micro_batch // self.parallel.sharers

    @property
    def tokens_of_step(self) -> int:
        """Of all ranks."""
        return self.tokens * self.micro_batches * self.stage_ranks

    @property
    def element_bytes(self) -> int:
        """Of a weight or a number of a row."""
        return ELEMENT_BYTES[self.number_type]

    @property
    def gradient_bytes(self) -> int:
        """Of a weight's gradient."""
        return 4 if self.sums_in_float32 else self.element_bytes
