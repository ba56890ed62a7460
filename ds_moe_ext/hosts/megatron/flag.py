# SPDX-License-Identifier: Apache-2.0
"""The flag by which Megatron's scripts name a file of settings."""

FLAG = "--ds-moe-ext-config"
