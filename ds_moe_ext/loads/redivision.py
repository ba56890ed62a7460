# SPDX-License-Identifier: Apache-2.0
"""Loads of one grid, made those of another: other ranks, tokens, layers, steps.

Shape letters: I steps, L layers, C senders before, D after, E experts, T tokens of a sender, P
parts of it, N places.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ds_moe_ext.loads.loads import MOST_ROWS, Loads, check_size
from ds_moe_ext.strict import at_least


def redivided(
    loads: Loads,
    *,
    ranks: int | None = None,
    tokens: int | None = None,
    layers: int | None = None,
    steps: int | None = None,
) -> Loads:
    """The same loads on another grid; what is None stays.

    Other ranks alone keep every expert's rows: the senders stand in a line that is cut into equal
    pieces, by whole tokens; some senders are joined, some divided. Other tokens multiply each
    sender's rows and round them to whole ones, largest remainder first, the lower index among
    equals: no sender's rows of an expert are off by one or more.

    Args:
        loads: that are taken.
        ranks: senders, ``D``.
        tokens: of a sender, in the mean; who had more keeps more.
        layers: the first so many; where there are fewer, they begin again.
        steps: the first so many.

    Raises:
        ValueError: nothing can be divided so.
    """
    for name, value in (("ranks", ranks), ("tokens", tokens), ("layers", layers), ("steps", steps)):
        at_least(name, value, 1)
    rows_ILCE, steps_I = loads.rows_ILCE, loads.steps_I
    num_steps, num_layers, num_senders, num_experts = rows_ILCE.shape
    if steps is not None and steps > num_steps:
        raise ValueError(
            f"steps is {steps}, but {loads.source} has {num_steps}; give that many or fewer"
        )
    if steps is not None:
        rows_ILCE, steps_I = rows_ILCE[:steps], steps_I[:steps]
    if layers is not None:
        check_size((len(steps_I), layers, num_senders, num_experts), loads.source)
        rows_ILCE = rows_ILCE[:, np.arange(layers) % num_layers]
    top_k = loads.top_k or 1
    if ranks is not None and ranks != num_senders:
        check_size((*rows_ILCE.shape[:2], ranks, num_experts), loads.source)
        rows_ILCE = _cut_anew(rows_ILCE, ranks, top_k)
    if tokens is not None:
        rows_ILCE = _with_tokens(rows_ILCE, tokens, top_k)
    return dataclasses.replace(loads, rows_ILCE=rows_ILCE, steps_I=steps_I)


def _cut_anew(rows_ILCE: np.ndarray, ranks: int, top_k: int) -> np.ndarray:
    num_senders = rows_ILCE.shape[2]
    rows_ILDE = np.zeros((*rows_ILCE.shape[:2], ranks, rows_ILCE.shape[3]), dtype=np.int64)
    for sender in range(num_senders):
        # In pieces of which a sender had ``ranks`` and shall have ``num_senders``.
        cuts = sorted({sender * ranks, (sender + 1) * ranks, *_between(sender, num_senders, ranks)})
        targets = [cut // num_senders for cut in cuts[:-1]]
        pieces = np.array(cuts) - sender * ranks
        parts_ILPE = _parts(rows_ILCE[:, :, sender], pieces, ranks, top_k)
        rows_ILDE[:, :, targets] += parts_ILPE
    return rows_ILDE


def _between(sender: int, num_senders: int, ranks: int) -> range:
    """Where senders to come begin inside of one that is."""
    first = -(-sender * ranks // num_senders) * num_senders
    return range(first, (sender + 1) * ranks, num_senders)


def _parts(rows_ILE: np.ndarray, pieces: np.ndarray, whole: int, top_k: int) -> np.ndarray:
    """Rows ``[I, L, P, E]`` of a sender's parts, each of whole tokens.

    In the order of experts the sender's rows are dealt to its tokens in turn. Each token gets
    ``top_k`` different experts, as none has more rows than there are tokens; each part gets tokens
    evenly from among them, and so its part of every expert's rows, to one or two.

    Args:
        rows_ILE: of the sender.
        pieces: where its parts begin and end, in pieces.
        whole: pieces of the sender.
        top_k: choices a token.
    """
    if len(pieces) == 2:
        return rows_ILE[:, :, None]
    shape = rows_ILE.shape
    rows_NE = rows_ILE.reshape(-1, shape[2])
    tokens_N = rows_NE.sum(axis=1) // top_k
    parts_NPE = np.zeros((len(rows_NE), len(pieces) - 1, shape[2]), dtype=np.int64)
    for tokens in np.unique(tokens_N):
        is_such_N = tokens_N == tokens
        parts_NPE[is_such_N] = _dealt(rows_NE[is_such_N], np.diff(tokens * pieces // whole))
    return parts_NPE.reshape(*shape[:2], -1, shape[2])


def _dealt(rows_NE: np.ndarray, tokens_P: np.ndarray) -> np.ndarray:
    """Rows ``[N, P, E]`` of parts that have so many tokens."""
    num_parts, num_tokens = len(tokens_P), int(tokens_P.sum())
    part_T = np.repeat(np.arange(num_parts), tokens_P)
    number_T = np.arange(num_tokens) - np.repeat(tokens_P.cumsum() - tokens_P, tokens_P)
    order_T = np.argsort((number_T + 0.5) / tokens_P[part_T], kind="stable")
    before_TP = np.zeros((num_tokens + 1, num_parts), dtype=np.int64)
    before_TP[1:] = (part_T[order_T][:, None] == np.arange(num_parts)).cumsum(axis=0)
    ends_NE = rows_NE.cumsum(axis=1)
    ends_NE1 = np.concatenate([np.zeros_like(ends_NE[:, :1]), ends_NE], axis=1)
    rounds_NE1, token_NE1 = np.divmod(ends_NE1, max(num_tokens, 1))
    until_NE1P = rounds_NE1[:, :, None] * tokens_P + before_TP[token_NE1]
    dealt_NPE: np.ndarray = np.diff(until_NE1P, axis=1).swapaxes(1, 2)
    return dealt_NPE


def _with_tokens(rows_ILCE: np.ndarray, tokens: int, top_k: int) -> np.ndarray:
    had_ILC = rows_ILCE.sum(axis=-1) // top_k
    all_IL = np.full(rows_ILCE.shape[:2], tokens * rows_ILCE.shape[2])
    if not had_ILC.sum(axis=-1).all():
        raise ValueError(
            f"tokens is {tokens}, but in some layer and step nobody has any, which no number "
            "multiplies; leave tokens out"
        )
    if int(all_IL.max()) * top_k > MOST_ROWS:
        raise ValueError(
            f"tokens is {tokens}, on {rows_ILCE.shape[2]} ranks with {top_k} choices each too many "
            f"rows to count; give {MOST_ROWS // (rows_ILCE.shape[2] * top_k)} at most"
        )
    return _apportioned(rows_ILCE, top_k * _apportioned(had_ILC, all_IL))


def _apportioned(weights_N: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Whole numbers ``[..., N]`` in proportion to weights, with a given sum ``[...]``: the largest
    remainders are rounded up, the first among equals."""
    sums = np.maximum(weights_N.sum(axis=-1, keepdims=True), 1)
    parts_N, over_N = np.divmod(weights_N * whole[..., None], sums)
    left = np.where(weights_N.any(axis=-1), whole - parts_N.sum(axis=-1), 0)
    order_N = np.argsort(-over_N, axis=-1, kind="stable")
    is_up_N = np.arange(weights_N.shape[-1]) < left[..., None]
    up_N = np.zeros_like(parts_N)
    np.put_along_axis(up_N, order_N, is_up_N.astype(np.int64), axis=-1)
    apportioned: np.ndarray = parts_N + up_N
    return apportioned
