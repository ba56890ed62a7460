#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The first five minutes, on 4 ranks of this machine, with or without GPUs: train a small
# mixture-of-experts language model with plain expert parallelism (ep) and with replicas of hot experts
# (fssdp), from the same weights and on the same text, and compare; show in slow motion what replicas
# save on a cluster; price two clusters. Four minutes on two quiet cores. Arguments go to
# launch/pretrain_deepspeed.py, both times; with a --model of your own the comparison is the end:
#   bash launch/quickstart.sh --data my_book.txt
# With --strategy NAME, or with a --deepspeed_config of your own, it trains once, as the file says:
#   bash launch/quickstart.sh --strategy ep --steps 50
set -euo pipefail
cd "$(dirname "$0")/.."

is_single=""
has_own_model=""
is_help=""
one_folder=""
for argument in "$@"; do
  case "${argument%%=*}" in
    -h | --help) is_help=yes ;;
    --strategy | --deepspeed_config) is_single=yes ;;
    --model) has_own_model=yes ;;
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
  python launch/quickstart.py compile
fi
# DeepSpeed calls collectives by names that torch has deprecated: one warning a rank.
export PYTHONWARNINGS=ignore::FutureWarning

# The launcher's own level, not that of the ranks: without a hostfile it warns that there is none.
train() {
  deepspeed --num_accelerators "$num_ranks" --master_port "${MASTER_PORT:-29500}" \
    --log_level error launch/pretrain_deepspeed.py \
    --model configs/models/gpt_moe_tiny.json \
    --deepspeed_config configs/hosts/deepspeed_zero1.json \
    "$@"
}

if [[ -n "$is_single" ]]; then
  train "$@"
  exit
fi

results=runs/quickstart
step() {
  echo
  echo "quickstart: $*"
}

# The loads of the first run on two clusters: Mixtral 8x7B has as many experts and choices a token.
price() {
  local cluster
  for cluster in dgx_h100 dgx_a100; do
    COLUMNS=170 ds-moe-ext price configs/hosts/deepspeed_zero1.json --model mixtral_8x7b \
      --hardware "$cluster" --nodes 8 --recomputes --length 4096 --micro-batch 4 \
      --loads "$results/ep/report.json" --strategies ep,fssdp,prophet,esp \
      --json "$results/price_$cluster.json" --html "$results/price_$cluster.html" \
      >"$results/price_$cluster.txt"
  done
}

# 40 steps in 32 bits: there, sums in another order do not yet flip a choice of an expert, so that
# the losses of both runs agree to the last digits.
short=(--dtype fp32 --steps 40)
step "training a small model with plain expert parallelism (ep)"
train --strategy ep "${short[@]}" "$@"
if [[ -z "$has_own_model" ]]; then
  price & # while one core waits for DeepSpeed to start
  pricing=$!
fi
step "the same with replicas of busy experts (fssdp)"
train --strategy fssdp "${short[@]}" "$@"
step "the two runs"
ds-moe-ext compare "$results/ep" "$results/fssdp"
if [[ -n "$has_own_model" ]]; then
  exit
fi
wait "$pricing"

step "where time is worth something: 50 s of a cluster in slow motion"
torchrun --standalone --nproc_per_node "$num_ranks" launch/bench/slow_motion.py \
  --json "$results/slow_motion.json"
echo
python launch/quickstart.py report "$results"
