# SPDX-License-Identifier: Apache-2.0
"""``torchrun ... -m ds_moe_ext.profile_run``: ``ds-moe-ext profile`` on every rank."""

from __future__ import annotations

import sys

from ds_moe_ext.commands.cluster_profile import main

if __name__ == "__main__":
    sys.exit(main())
