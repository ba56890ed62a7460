# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of ours where the block is off: DeepSpeed alone would find no experts in it.

Its own file beside ours has dense weights only, so that a load that is not strict would leave all
experts as they were drawn, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_moe_ext.hosts.deepspeed.layout_file import LAYOUT_FILE, SavedLayout
from ds_moe_ext.strategies.settings import BLOCK


def refuse_ours(engine: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of ours that DeepSpeed is about to load by itself; not where a function
    of the user's own takes the weights, which sees what is there.

    Args:
        engine: DeepSpeed's, without layers of ours.
        arguments: of its ``_load_checkpoint``.

    Raises:
        ValueError: its experts are where only we read them.
    """
    folder = Path(arguments["load_dir"]) / str(arguments["tag"])
    if arguments["custom_load_fn"] is not None or not (folder / LAYOUT_FILE).exists():
        return
    if not _is_written_over(engine, folder):
        raise ValueError(
            f"the checkpoint {folder} was written with ds_moe_ext ({LAYOUT_FILE} in it says so), "
            f"but {BLOCK} is not enabled here, and DeepSpeed alone cannot read its experts; set "
            f"{BLOCK}.enabled to true, or bring it into the model's own form by 'ds-moe-ext "
            f"convert --to huggingface' (if a run without ds_moe_ext has written over it, remove "
            f"{LAYOUT_FILE})"
        )


def _is_written_over(engine: Any, folder: Path) -> bool:
    """Whether what DeepSpeed reads there is of a later save without us, which leaves our file."""
    sums = SavedLayout.read(folder).files or {}
    theirs = [Path(each) for each in engine._get_all_ckpt_names(folder.parent, folder.name)]
    if not theirs or not any("/" not in name for name in sums):
        return False  # DeepSpeed finds nothing, or we were not told the length of its file
    return all(path.stat().st_size != sums.get(path.name, (None,))[0] for path in theirs)
