# SPDX-License-Identifier: Apache-2.0
"""As there."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
