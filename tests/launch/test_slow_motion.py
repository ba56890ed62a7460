# SPDX-License-Identifier: Apache-2.0
"""Links that only take time, and a model's layers on a described cluster in slow motion."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import slow_motion
from pace import Card
from slow_motion import Scene

from ds_moe_ext.files.documents import CONFIGS
from tests.ranks import pool_of


def seconds_of(*loads: tuple[int, int], card: Card) -> float:
    """Of transfers that begin together, by threads."""
    threads = [threading.Thread(target=card.carry, args=load) for load in loads]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start_s


def test_a_card_takes_its_time() -> None:
    card = Card(bytes_per_s=1e6, start_s=0.02)
    assert card.carry(0, 0) is None
    assert 0.1 <= seconds_of((80_000, 30_000), card=card) < 3
    assert 0.1 <= seconds_of((0, 80_000), card=card) < 3


def test_streams_share_a_card() -> None:
    """Two as long as one of both; the shorter ends earlier."""
    card = Card(bytes_per_s=1e6, start_s=0.0)
    assert 0.19 <= seconds_of((100_000, 0), (0, 100_000), card=card) < 3
    assert card._sharers == 0


def test_a_scene_takes_what_the_price_says() -> None:
    """As in tests/pricing/test_worked_example.py: Mixtral 8x7B on H100s, 4,096 tokens a rank."""
    words = ("--model", "mixtral_8x7b", "--hardware", "dgx_h100", "--tokens", "4096")
    scene = Scene.of(slow_motion.parse_arguments((*words, "--slower", "3")), 4)
    sizes = scene.sizes(2)
    assert scene.pace.attention_s == pytest.approx(3 * 1.0112e-3, rel=1e-4)
    assert sizes.rows * scene.pace.row_s == pytest.approx(3 * 4.9621e-3, rel=1e-4)
    assert sizes.rows * scene.rows_each == 8192
    # A rank's part of a node's cards: 50 GB/s, of which 80 % are reached.
    row_s = slow_motion.ROW_BYTES / scene.card.bytes_per_s
    assert row_s == pytest.approx(3 * scene.rows_each * 8192 / 40e9)
    expert_s = sizes.expert_rows * slow_motion.ROW_BYTES / scene.card.bytes_per_s
    assert expert_s == pytest.approx(3 * 2 * 3 * 4096 * 14336 / 40e9)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--tokens", "100"), "--tokens 100 cannot be shown by rows that stand for 32 each"),
        (("--hardware", "dgx"), "or name one of configs/hardware: "),
    ],
)
def test_scenes_that_cannot_be(words: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Scene.of(slow_motion.parse_arguments(words), 4)


def test_a_cluster_without_a_network(tmp_path: Path) -> None:
    described = json.loads((CONFIGS / "hardware" / "dgx_a100.json").read_text())
    del described["inter"]
    path = tmp_path / "one_node.json"
    path.write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"has no link between nodes \(inter\)"):
        Scene.of(slow_motion.parse_arguments(("--hardware", str(path))), 4)


def shown(rank: int, world_size: int, path: Path) -> list[slow_motion.Result]:
    words = ("--layers", "1", "--tokens", "1024", "--rounds", "1", "--steps_per_round", "1")
    fast = ("--slower", "4", "--json", str(path))
    return slow_motion.show(slow_motion.parse_arguments((*words, *fast)))


@pytest.mark.slow
def test_every_strategy_is_shown(tmp_path: Path) -> None:
    """Few rounds measure little; what rows do is counted, and gradients are compared."""
    results, *_ = pool_of(4).run(shown, tmp_path / "shown.json")
    assert [each.name for each in results] == ["ep", "fssdp", "prophet"]
    plain, *copied = results
    assert plain.seconds[0] > plain.limit_s > 0
    assert plain.hidden_gather is None and plain.remote == pytest.approx(0.75, abs=0.05)
    assert any(each.replica_bytes > 0 and each.balance < plain.balance for each in copied)
    document = json.loads((tmp_path / "shown.json").read_text())
    assert document["load"] >= 0 and document["cores"] >= 1
    assert [each["name"] for each in document["results"]] == [each.name for each in results]
    assert slow_motion.table_of(results).row_count == len(results)
