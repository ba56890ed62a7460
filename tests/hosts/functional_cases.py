# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own functional tests with experts, and what we say to their flags.

``python -m tests.hosts.functional_cases CHECKOUT STRATEGY`` prints a table: case, whether it is
refused at start, and why. Nothing is run: flags are read from ``model_config.yaml`` of a checkout.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from ds_moe_ext.hosts.attachment.notices import Refusal

FOLDER = Path("tests/functional_tests/test_cases")
OTHER_NAMES = {  # of a flag in the config that Megatron makes of it
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "fp8_param_gather": "fp8_param",
    "swiglu": "gated_linear_unit",
    "quick_geglu": "gated_linear_unit",
}
DEFAULTS: dict[str, Any] = {
    "moe_token_dispatcher_type": "allgather",
    "gated_linear_unit": False,
    "mtp_num_layers": None,
    "tensor_model_parallel_size": 1,
    "add_bias_linear": True,
    "transformer_impl": "transformer_engine",
}
WRAPPERS = ("use_megatron_fsdp", "use_torch_fsdp2")
"""Flags by which the model is in another wrapper than Megatron's DDP, which is seen at start."""


@dataclass(frozen=True)
class Case:
    """A functional test."""

    name: str  # with the folder of its kind before it
    arguments: dict[str, Any]  # flag -> value, as its file says

    @property
    def trains(self) -> bool:
        """Whether it is training alone: those that infer have no number of steps, or reinforce."""
        is_counted = {"--train-iters", "--train-samples"} & self.arguments.keys()
        return bool(is_counted) and not self.arguments.get("--perform-rl-step")

    def config(self) -> SimpleNamespace:
        """What a ``TransformerConfig`` would say, in all that refusals ask about."""
        found = dict(DEFAULTS)
        for flag, value in self.arguments.items():
            if value is not False:  # which their launcher leaves out
                name = flag.removeprefix("--").replace("-", "_")
                found[OTHER_NAMES.get(name, name)] = _parsed(value)
        found["add_bias_linear"] = "disable_bias_linear" not in found
        return SimpleNamespace(**found)


def _parsed(value: Any) -> Any:
    """A list may be written in brackets, of words with spaces between."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        return value[1:-1].replace(",", " ").split()
    return value


def cases(checkout: Path) -> list[Case]:
    """All cases with experts, by name."""
    found = []
    for path in sorted((checkout / FOLDER).glob("*/*/model_config.yaml")):
        arguments = yaml.safe_load(path.read_text()).get("MODEL_ARGS") or {}
        if arguments.get("--num-experts"):
            name = path.parent.relative_to(checkout / FOLDER).as_posix()
            found.append(Case(name, arguments))
    return found


def refusals(case: Case, tables: Sequence[Sequence[Refusal]]) -> list[Refusal]:
    """Every refusal that a case meets, by tables that ask a config, and by its wrapper."""
    config = case.config()
    met = [refusal for table in tables for refusal in table if refusal.asked(config)]
    reason = "expert weights must be in Megatron's DistributedDataParallel"
    for name in WRAPPERS:
        if getattr(config, name, False):
            flag = "--" + name.replace("_", "-")
            met.append(Refusal(flag, lambda _: "given", reason, "leave it out"))
    return met


def table(found: Sequence[Case], tables: Sequence[Sequence[Refusal]]) -> str:
    """Case, verdict and reason, in Markdown; counts behind it."""
    lines = ["| case | verdict | why |", "|---|---|---|"]
    met = {case.name: refusals(case, tables) for case in found}
    for case in found:
        verdict = "refused" if met[case.name] else "runs"
        why = "; ".join(f"`{one.what}`: {one.reason}" for one in met[case.name])
        lines.append(f"| {case.name} | {verdict} | {why} |")
    is_free = sum(not each for each in met.values())
    often = Counter(one.what for each in met.values() for one in each)
    lines += ["", f"{is_free} of {len(found)} cases are not refused. By flag:", ""]
    return "\n".join(lines + [f"- `{what}`: {count}" for what, count in often.most_common()])


def of_megatron(strategy: str = "fssdp") -> list[Sequence[Refusal]]:
    """Our tables that ask a config of the model, or of its optimizer: both have their flags."""
    from ds_moe_ext.hosts.megatron.refusals import GUESTS, REFUSALS, REPLICAS, STEPPING

    by_strategy = {"ep": (GUESTS,), "fssdp": (GUESTS, REPLICAS)}
    return [*by_strategy.get(strategy, (REFUSALS,)), STEPPING]


if __name__ == "__main__":
    trained = [case for case in cases(Path(sys.argv[1])) if case.trains]
    print(table(trained, of_megatron(*sys.argv[2:])))
