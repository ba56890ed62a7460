#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train a small mixture-of-experts language model twice on 4 ranks of this machine, with or without
# GPUs: with plain expert parallelism (ep) and with copies of hot experts (fssdp), from the same
# weights and on the same text; then compare. Four minutes on two cores. Arguments go to
# launch/pretrain_deepspeed.py, both times:
#   bash launch/quickstart.sh --data my_book.txt
# With --strategy NAME, or with a --deepspeed_config of your own, it trains once:
#   bash launch/quickstart.sh --strategy ep --steps 50
set -euo pipefail
cd "$(dirname "$0")/.."

is_single=""
is_help=""
one_folder=""
for argument in "$@"; do
  case "${argument%%=*}" in
    -h | --help) is_help=yes ;;
    --strategy | --deepspeed_config) is_single=yes ;;
    --output | --save) one_folder="${argument%%=*}" ;;
  esac
done
if [[ -z "$is_single" && -n "$one_folder" ]]; then
  echo "quickstart: $one_folder names one folder for two runs; add --strategy NAME" >&2
  exit 2
fi

source launch/environment.sh

if [[ -n "$is_help" ]]; then
  python launch/pretrain_deepspeed.py --help
  exit
fi

num_ranks=4
if ((num_gpus > 0 && num_gpus < num_ranks)); then
  echo "quickstart: $num_gpus of the $num_ranks GPUs it would use are visible; running on the CPU"
  export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
fi
if [[ "${DS_ACCELERATOR:-}" == cpu ]]; then
  python - <<'END'
from ds_moe_ext.hosts.deepspeed.op_lock import is_compiled, told_of_old_lock

told = told_of_old_lock()
if told:
    raise SystemExit(f"quickstart: {told}")
if not is_compiled():
    print("quickstart: DeepSpeed now compiles its CPU collectives, once: 20 to 60 s of silence")
END
fi
# DeepSpeed calls collectives by names that torch has deprecated: one warning a rank.
export PYTHONWARNINGS=ignore::FutureWarning

train() {
  deepspeed --num_accelerators "$num_ranks" --master_port "${MASTER_PORT:-29500}" \
    --log_level warning launch/pretrain_deepspeed.py \
    --model configs/models/gpt_moe_tiny.json \
    --deepspeed_config configs/hosts/deepspeed_zero1.json \
    "$@"
}

if [[ -n "$is_single" ]]; then
  train "$@"
  exit
fi

strategies=(ep fssdp)
for strategy in "${strategies[@]}"; do
  echo "quickstart: training with strategy $strategy"
  train --strategy "$strategy" "$@"
done
python launch/compare.py "${strategies[@]/#/runs/quickstart/}"
if [[ "${DS_ACCELERATOR:-}" == cpu ]]; then
  echo "On a CPU the ranks share cores: a rank that waits leaves its core to the busy ones, so that"
  echo "balance shows in the rows and hardly in the seconds."
fi
