# SPDX-License-Identifier: Apache-2.0
"""What was public under another name goes on, after one notice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

import ds_moe_ext
from ds_moe_ext import Intervals, Job, LocalElseOwner, Placement, Plan, Strategy, older_names
from ds_moe_ext.strategies.fssdp import FullySharded
from ds_moe_ext.strategies.settings import read_settings
from ds_moe_ext.strict import fields_of, read_record


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Notices are given again."""
    older_names._notice.cache_clear()
    yield
    older_names._notice.cache_clear()


def test_names_of_the_package() -> None:
    for old, new in older_names.PUBLIC.items():
        with pytest.warns(UserWarning, match=f"{old} is the older name of {new}; write {new}"):
            assert getattr(ds_moe_ext, old) is getattr(ds_moe_ext, new)
    assert not older_names.PUBLIC.keys() & set(ds_moe_ext.__all__)


def test_keys_of_a_block() -> None:
    block = {"enabled": True, "strategy": "fssdp", "fssdp": {"copies_per_rank": 3}}
    with pytest.warns(UserWarning, match=r"ds_moe_ext\.fssdp\.copies_per_rank is the older name"):
        _, strategy = read_settings({"ds_moe_ext": block})
    assert isinstance(strategy, FullySharded) and strategy.replicas_per_rank == 3
    both = {"copies_per_rank": 3, "replicas_per_rank": 3}
    with pytest.raises(ValueError, match="has no key 'copies_per_rank'"):
        read_record(FullySharded, both, "ds_moe_ext.fssdp")
    assert not older_names.KEYS.keys() & {field.name for field in fields_of(FullySharded)}


OWNER = Placement.block(4, 2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (lambda: OWNER.num_cells, OWNER.num_ep_ranks),
        (lambda: Plan(home=OWNER, target=OWNER, share=LocalElseOwner(OWNER, OWNER)).home, OWNER),
        (lambda: Intervals(plan_every=1).weighs_copies, True),
        (lambda: Job.at_start([OWNER], np.zeros(2, dtype=np.int64)).homes, (OWNER,)),
    ],
)
def test_members(old: Callable[[], object], new: object) -> None:
    with pytest.warns(UserWarning, match="is the older name of"):
        assert old() == new


def test_a_strategy_of_before() -> None:
    with pytest.warns(UserWarning, match="rhythm is the older name of intervals"):

        @dataclass(frozen=True)
        class Own(Strategy):
            def rhythm(self) -> Intervals:
                return Intervals(plan_every=7)

            def plan(self, job: Job) -> tuple[Plan, ...]:
                raise NotImplementedError

    assert Own().intervals().plan_every == 7
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        Own().nothing  # noqa: B018


def test_files_keep_them() -> None:
    written = {"num_ep_ranks": 2, "kinds_K": ["forward:etp_gather"], "forward:etp_gather": 1}
    on_disk = {"num_cells": 2, "kinds_K": ["forward:cell_gather"], "forward:cell_gather": 1}
    assert older_names.on_disk(written) == on_disk
    assert older_names.from_disk(json.loads(json.dumps(on_disk)))["kinds_K"] == written["kinds_K"]
