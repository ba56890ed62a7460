#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What a step of one's own model would take under every strategy, on two DGX H100, by prices alone.
# my_model/config.json is any config.json of Hugging Face; the cluster is named (configs/hardware),
# or measured: ds-moe-ext profile. All options: docs/price.md.
set -euo pipefail
cd "$(dirname "$0")"
ds-moe-ext price deepspeed_mixtral.json --model my_model --hardware dgx_h100 --nodes 2 \
  --length 4096 --recomputes "$@"
