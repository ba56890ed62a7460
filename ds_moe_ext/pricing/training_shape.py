# SPDX-License-Identifier: Apache-2.0
"""How a model is trained, as far as its price depends on it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
MASTER_AND_STATES = 12  # bytes of a weight for Adam: itself and two states, in 32 bits


@dataclass(frozen=True, kw_only=True)
class Training:
    """One optimizer step of a run.

    Attributes:
        num_ranks: of the run.
        length: tokens of a sample.
        micro_batch: samples of a rank in one pass.
        micro_batches: passes of a step.
        number_type: in which matrices are multiplied: ``fp32``, ``tf32``, ``fp16`` or ``bf16``.
        zero_stage: as DeepSpeed counts: from 1 ranks divide optimizer states, from 2 gradients,
            from 3 dense weights. Megatron's distributed optimizer is 1.
        recomputes: layers run again in backward, so that only what passes between them is kept.
        hides_gradients: dense gradients are reduced beside backward by the host itself.
        sums_in_float32: gradients are summed in 32 bits, where they are narrower.

    Raises:
        ValueError: no such training.
    """

    num_ranks: int
    length: int
    micro_batch: int = 1
    micro_batches: int = 1
    number_type: str = "bf16"
    zero_stage: int = 1
    recomputes: bool = False
    hides_gradients: bool = False
    sums_in_float32: bool = False

    def __post_init__(self) -> None:
        for name in ("num_ranks", "length", "micro_batch", "micro_batches"):
            if vars(self)[name] < 1:
                raise ValueError(f"{name} is {vars(self)[name]}; give at least 1")
        if self.number_type not in ELEMENT_BYTES:
            raise ValueError(
                f"number_type is {self.number_type!r}; choose {', '.join(ELEMENT_BYTES)}"
            )

    @property
    def tokens(self) -> int:
        """Of a rank in one pass."""
        return self.length * self.micro_batch

    @property
    def tokens_of_step(self) -> int:
        """Of all ranks."""
        return self.tokens * self.micro_batches * self.num_ranks

    @property
    def element_bytes(self) -> int:
        """Of a weight or a number of a row."""
        return ELEMENT_BYTES[self.number_type]

    @property
    def gradient_bytes(self) -> int:
        """Of a weight's gradient."""
        return 4 if self.sums_in_float32 else self.element_bytes
