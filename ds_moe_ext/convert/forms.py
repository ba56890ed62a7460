"""The forms, and which of them a folder has."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from ds_moe_ext.convert import deepspeed, huggingface, megatron


class Form(Enum):
    """How a checkpoint is kept."""

    MEGATRON = "megatron"
    DEEPSPEED = "deepspeed"
    HUGGINGFACE = "huggingface"


_IS_HERE = {
    Form.MEGATRON: megatron.is_here,
    Form.DEEPSPEED: deepspeed.is_here,
    Form.HUGGINGFACE: huggingface.is_here,
}


def form_of(folder: Path, told: Form | None) -> Form:
    """That of a folder.

    Args:
        folder: of a checkpoint.
        told: what it is said to be.

    Raises:
        ValueError: it is not; or of none, or of several.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name the folder of a checkpoint")
    found = [form for form, is_here in _IS_HERE.items() if is_here(folder)]
    if told in found:
        return told
    signs = (
        f"megatron has {megatron.TRACKER} or {megatron.BACKENDS}, deepspeed {deepspeed.LATEST} or "
        f"{deepspeed.LAYOUT_FILE}, huggingface config.json and *.safetensors"
    )
    if told is not None:
        raise ValueError(f"{folder} is no checkpoint of form {told.value}: {signs}")
    if len(found) != 1:
        names = " and ".join(form.value for form in found) or "none of the forms"
        raise ValueError(f"{folder} looks like {names}: {signs}; say which with --from")
    return found[0]
