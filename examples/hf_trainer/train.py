# SPDX-License-Identifier: Apache-2.0
"""A small Mixtral under Hugging Face's Trainer, which trains on this file's own text.
Nothing here imports ds_moe_ext: the section "ds_moe_ext" of the DeepSpeed JSON enables it.
deepspeed --num_accelerators 2 examples/hf_trainer/train.py --deepspeed FILE.json
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    HfArgumentParser,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

LENGTH, SAMPLES = 64, 160
DEFAULTS = {
    "output_dir": "runs/hf_trainer",
    "per_device_train_batch_size": 4,
    "max_steps": 10,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": not torch.cuda.is_available(),
}


def main() -> None:
    """Train for a few steps, then export; rank 0 prints losses."""
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(**DEFAULTS)  # any flag of TrainingArguments overrides these
    (arguments,) = parser.parse_args_into_dataclasses()

    set_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    )
    text = torch.tensor(list(Path(__file__).read_bytes()))
    starts_B = torch.randint(len(text) - LENGTH, (SAMPLES, 1))
    ids_BT = text[starts_B + torch.arange(LENGTH)]
    dataset = [{"input_ids": ids_T, "labels": ids_T} for ids_T in ids_BT]

    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    trainer.train()
    if arguments.local_process_index == 0:
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        for step, entry in enumerate(logged, 1):
            print(f"step {step}: loss {float(entry['loss']):.4f}", flush=True)
    trainer.save_model()  # whole experts under the model's own names; call it on all ranks
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
