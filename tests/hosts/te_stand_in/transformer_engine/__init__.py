# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Transformer Engine 2.11 on a CPU: what Megatron-core 0.16.1 asks of it.

Same names, signatures, attributes and calls, computed by plain torch in the tensors' own type; a
folder above is for PYTHONPATH. ``test_te_stand_in.py`` holds it against the real one's source.

- fp8: inputs, weights and gradients of outputs are rounded through torch's fp8 types and stay in
  their own; scales are those of the moment, per tensor or per block of a row (``pytorch/fp8.py``).
- Not here: fp8 primary weights, context parallelism, packed sequences, ops, CUDA graphs, and what
  Megatron does without: optimizers and the kernel for cross-entropy.
"""

from transformer_engine import common, pytorch

__version__ = "2.11.0"
__all__ = ["common", "pytorch"]
