#!/usr/bin/env bash
# Train a small mixture-of-experts language model for three minutes on 4 ranks of this machine,
# with or without GPUs. Arguments go to launch/pretrain_deepspeed.py, for example
#   bash launch/quickstart.sh --strategy ep --steps 50
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh

num_ranks=4
if ((num_gpus > 0 && num_gpus < num_ranks)); then
  echo "quickstart: $num_gpus of the $num_ranks GPUs it would use are visible; running on the CPU"
  export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
fi
if [[ "${DS_ACCELERATOR:-}" == cpu ]]; then
  cache="${TORCH_EXTENSIONS_DIR:-$HOME/.cache/torch_extensions}"
  if [[ -z "$(find "$cache" -name 'deepspeed_shm_comm.so' 2>/dev/null)" ]]; then
    echo "quickstart: DeepSpeed now compiles its CPU collectives, once: 20 to 60 s of silence"
  fi
fi
# DeepSpeed calls collectives by names that torch has deprecated: one warning a rank.
export PYTHONWARNINGS=ignore::FutureWarning

deepspeed --num_accelerators "$num_ranks" --master_port "${MASTER_PORT:-29500}" \
  --log_level warning launch/pretrain_deepspeed.py \
  --model configs/models/gpt_moe_tiny.json \
  --deepspeed_config configs/hosts/deepspeed_zero1.json \
  "$@"

echo "Losses, speed and balance: summary.json in the folder named above (runs/quickstart/NAME)."
echo "Another strategy: bash launch/quickstart.sh --strategy NAME; then compare the two files."
