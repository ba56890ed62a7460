"""The flag by which Megatron's scripts name a file of settings."""

FLAG = "--ds-moe-ext-config"
