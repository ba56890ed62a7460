# SPDX-License-Identifier: Apache-2.0
"""Memory of replicas and of what waits for backward, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ds_moe_ext.core.hardware import Device, Hardware
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner
from ds_moe_ext.planning.described_run import DescribedRun, copied_bytes_C
from ds_moe_ext.planning.model_shape import Training, of_config, of_megatron
from ds_moe_ext.planning.prophet_planner import Split
from ds_moe_ext.planning.strategy import Carried, Plan

OWNER = Placement.block(4, 2)  # experts 0 and 1 live in EP rank 0


def copying(experts: list[int], *, rematerialize: bool = False) -> Plan:
    """These experts compute in both EP ranks."""
    replicas_EC = np.zeros_like(OWNER.holds_EC)
    replicas_EC[experts] = True
    target = OWNER.with_replicas(replicas_EC)
    return Plan(OWNER, target, LocalElseOwner(OWNER, target), rematerialize=rematerialize)


COPIED = ([0], [0, 1, 2], [2])  # of three layers: EP rank 0 gets 0, 1, 1; EP rank 1 gets 1, 2, 0
BYTES_L = (10, 10, 100)


@pytest.mark.parametrize(
    ("frees", "carries", "accumulates", "ep_rank_0", "ep_rank_1"),
    [
        (False, False, False, 110 + 100, 30 + 20),  # all replicas, the largest layer's gradients
        (False, False, True, 110 + 110, 30 + 30),
        (True, False, False, 100 + 100, 20 + 20),
        (True, False, True, 100 + 100, 20 + 20),
        (True, True, False, 110 + 110, 30 + 30),  # two layers at a time
        (False, True, False, 110 + 110, 30 + 30),
    ],
)
def test_replicas_and_their_gradients(
    frees: bool, carries: bool, accumulates: bool, ep_rank_0: int, ep_rank_1: int
) -> None:
    plans = [copying(experts, rematerialize=frees) for experts in COPIED]
    if carries:
        plans[1] = replace(plans[1], carried=Carried(Split((), ()), Split((), ())))
    held_C = copied_bytes_C(plans, BYTES_L, accumulates=accumulates)
    assert held_C.tolist() == [ep_rank_0, ep_rank_1]


def test_experts_at_owner_take_nothing() -> None:
    plans = [Plan.at_owner(OWNER)] * 3
    assert copied_bytes_C(plans, BYTES_L, accumulates=True).tolist() == [0, 0]


HARDWARE = Hardware(
    name="it", source="a test", num_nodes=1, ranks_per_node=1, device=Device(name="it")
)
TOKENS, WIDTH = 128, 64


def kept(flags: dict[str, object], **given: object) -> float:
    """Bytes of a micro-batch of one rank that wait for backward; tokens are routed evenly."""
    shape = of_megatron({"hidden-size": WIDTH, "vocab-size": 0, "swiglu": True, **flags}, "it")
    training = Training(num_ranks=1, length=TOKENS, is_fused=True, **given)  # type: ignore[arg-type]
    run = DescribedRun(hardware=HARDWARE, shape=shape, training=training, grid=Grid(1, 1))
    return run.activations(TOKENS * shape.top_k).kept


DENSE = {"num-layers": 2, "num-attention-heads": 8, "moe-layer-freq": "[0,1]"}
MOE = {**DENSE, "num-experts": 4, "moe-router-topk": 2, "moe-ffn-hidden-size": 48}
STATE = 2 * TOKENS * WIDTH  # bytes of a hidden state


def test_a_dense_layer_as_in_the_paper() -> None:
    """Korthikanti et al. 2022, equation 1: 34 s b h of a layer whose MLP is 4 h wide, of which 2
    are masks of dropout; 5 a s s b are the scores that fused attention does not keep."""
    one, two = (
        kept(
            {**MOE, "num-layers": n, "moe-layer-freq": f"[1]+[0]*{n - 1}", "swiglu": False}
            | {"ffn-hidden-size": 4 * WIDTH}
        )
        for n in (1, 2)
    )
    assert two - one == (34 - 2) * TOKENS * WIDTH


# Grouped attention of 2 groups of 8 heads, 8 wide: norms take and give 4 states; queries, keys,
# values and what they come to 2.5; a routed token 64 + 3 x 48 numbers.
GROUPED = {**MOE, "num-layers": 1, "moe-layer-freq": 1, "num-query-groups": 2}
ROWS, INNER = 2 * TOKENS * 2, 48


@pytest.mark.parametrize(
    ("again", "states", "of_row"),
    [
        ((), 6.5, WIDTH + 3 * INNER),
        (("core_attn",), 6.5, WIDTH + 3 * INNER),  # fused: there are no scores to free
        (("moe_act",), 6.5, WIDTH + 2 * INNER),
        (("layernorm",), 5.5, WIDTH + 3 * INNER),  # the other one is part of a product
        (("layernorm", "moe_act"), 5.5, WIDTH + 2 * INNER),
        (("moe",), 6.5, 0),
    ],
)
def test_modules_that_run_again_keep_less(
    again: tuple[str, ...], states: float, of_row: int
) -> None:
    assert kept(GROUPED, again=again) == states * STATE + ROWS * of_row


def test_norms_of_heads_shared_experts_and_whole_layers() -> None:
    plain = kept(GROUPED)
    assert kept({**GROUPED, "qk-layernorm": True}) == plain + 1.25 * STATE
    shared = {**GROUPED, "moe-shared-expert-intermediate-size": 32}
    assert kept(shared) == plain + 2 * TOKENS * 3 * 32
    for module in ("shared_experts", "moe"):
        alone = kept(GROUPED, again=(module,))
        assert kept(shared, again=(module,)) == alone
    assert kept(shared, recomputes=True) == STATE


def test_latent_attention() -> None:
    """DeepSeek-V3's: 4 states; latent vectors of 1,536 and 512 before and behind norms, 64 of
    rotation; 128 heads of 192 (queries and keys) and 128 (values and what they come to)."""
    latent = {
        "multi-latent-attention": True,
        "num-attention-heads": 128,
        "q-lora-rank": 1536,
        "kv-lora-rank": 512,
        "qk-head-dim": 128,
        "qk-pos-emb-head-dim": 64,
        "v-head-dim": 128,
    }
    flags = {**GROUPED, **latent}
    rows = ROWS * (WIDTH + 3 * INNER)
    attention = 2 * (1536 + 512) + 64 + 128 * 128
    up = 128 * (2 * 192 + 128)
    assert kept(flags) == 4 * STATE + 2 * TOKENS * (attention + up) + rows
    left = kept(flags, again=("mla_up_proj", "layernorm"))
    assert left == 2 * STATE + 2 * TOKENS * attention + rows


def test_families_that_normalize_heads() -> None:
    keys = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 1, "num_experts": 4}
    keys |= {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "vocab_size": 0}
    plain, normed = (of_config({**keys, "model_type": t}, "it") for t in ("mixtral", "qwen3_moe"))
    assert (plain.attention_kept, normed.attention_kept) == ((256, 0), (384, 0))
