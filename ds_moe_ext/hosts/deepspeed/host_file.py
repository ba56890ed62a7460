# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own file of a checkpoint: that it is whole, and of the save that the rest is of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
    DecoupledCheckpointEngine,
)
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils import groups

from ds_moe_ext.files.unpickle import damaged
from ds_moe_ext.hosts.deepspeed.checkpoint_reader import Asked, agreed
from ds_moe_ext.hosts.deepspeed.layout_file import LAYOUT_FILE, SAVE, SavedLayout


def written(engine: Any, save_dir: str, tag: str) -> list[str]:
    """Names of the files that DeepSpeed has written here, when its writer has ended; not where
    another's goes on when it has returned."""
    is_writer = groups._get_data_parallel_rank() == 0
    ends = (TorchCheckpointEngine, DecoupledCheckpointEngine)
    if not is_writer or not isinstance(engine.checkpoint_engine, ends):
        return []
    return [Path(engine._get_ckpt_name(save_dir, tag)).name]


@contextmanager
def checked(engine: Any, asked: Asked, layout: SavedLayout) -> Iterator[None]:
    """While it lasts, what DeepSpeed reads of its file is refused on all ranks if it is damaged, or
    of another save."""
    reader = engine.checkpoint_engine
    given = reader.load

    def load(path: str, *args: Any, **kwargs: Any) -> Any:
        def read_states() -> Any:
            try:
                states = given(path, *args, **kwargs)
            except Exception as error:  # a damaged file may raise anything
                raise damaged(Path(path), error) from error
            _check_states(Path(path), states, layout)
            return states

        return agreed(asked.folder, read_states)

    reader.load = load
    try:
        yield
    finally:
        del reader.load


_STATES = (
    *("module", "num_experts", "dp_world_size", "mp_world_size", "global_steps", "skipped_steps"),
)
"""What DeepSpeed takes from it, some of it when weights have been loaded."""


def _check_states(path: Path, states: Any, layout: SavedLayout) -> None:
    lacks = [k for k in _STATES if not isinstance(states, Mapping) or k not in states]
    if lacks or not isinstance(states["module"], Mapping):
        raise ValueError(
            f"{path} has no {lacks or 'weights'}: it is damaged; copy the whole folder again, or "
            "choose another checkpoint"
        )
    layout.check_save(path, states.get(SAVE))
    if states["global_steps"] != layout.step:
        raise ValueError(
            f"{path} is of step {states['global_steps']}, but {LAYOUT_FILE} beside it of step "
            f"{layout.step}: parts of two checkpoints lie together; copy one of them whole"
        )
