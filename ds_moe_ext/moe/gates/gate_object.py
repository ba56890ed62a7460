# SPDX-License-Identifier: Apache-2.0
"""Which gate a JSON object names, read strictly."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ds_moe_ext.moe.gate import Gate, SoftmaxTopK
from ds_moe_ext.moe.gates.cosine_top_k import CosineTopK
from ds_moe_ext.moe.gates.expert_choice import ExpertChoice
from ds_moe_ext.moe.gates.noisy_top_k import NoisyTopK
from ds_moe_ext.moe.gates.sigmoid_top_k import SigmoidTopK
from ds_moe_ext.moe.gates.soft import SoftMixture
from ds_moe_ext.strict import check_object, found_at, named, read_record

GATES: Mapping[str, type[Gate]] = {
    "softmax_top_k": SoftmaxTopK,
    "noisy_top_k": NoisyTopK,
    "sigmoid_top_k": SigmoidTopK,
    "cosine_top_k": CosineTopK,
    "expert_choice": ExpertChoice,
    "soft": SoftMixture,
}
"""By the name that JSON gives as ``type``."""

OWN = " A gate of your own is 'my_package.my_module:MyGate'"


def read_gate(values: Any, where: str) -> Gate:
    """A gate from a JSON object: its ``type``, and beside it the gate's own keys.

    Args:
        values: what ``json`` read.
        where: dotted name of the object, for errors.

    Raises:
        ValueError: the type is unknown, or a key or value is not the gate's.
    """
    check_object(where, values)
    if "type" not in values:
        raise ValueError(f"{where} needs the key 'type'; add it: {', '.join(map(repr, GATES))}")
    keys = dict(values)
    cls = named(keys.pop("type"), f"{where}.type", GATES, _class_at, OWN)
    try:
        return read_record(cls, keys, where)
    except ValueError as error:
        if str(error).startswith(where):
            raise
        raise ValueError(f"{where}: {error}") from error


def _class_at(path: str, where: str) -> type[Gate]:
    cls = found_at(path, where, "'my_package.my_module:MyGate'")
    if not (isinstance(cls, type) and issubclass(cls, Gate)) or inspect.isabstract(cls):
        raise ValueError(
            f"{where} is {path!r}, which is no gate; derive it from ds_moe_ext.moe.gate.Gate, and "
            "let it choose"
        )
    if "__dataclass_params__" not in vars(cls):
        raise ValueError(
            f"{where} is {path!r}, which is not a dataclass; make it one: its fields are its JSON "
            "keys"
        )
    return cls
