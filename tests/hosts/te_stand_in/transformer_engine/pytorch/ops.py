# SPDX-License-Identifier: Apache-2.0
"""Names of the op fuser that Megatron's annotations have."""

from torch import nn


class FusibleOperation(nn.Module): ...


class Sequential(nn.Sequential): ...
