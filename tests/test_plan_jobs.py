# SPDX-License-Identifier: Apache-2.0
"""Planners as jobs in JSON: good input, and every kind of bad input in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from ds_moe_ext.commands.plan import ALGORITHMS, plan_text

MATERIALIZE, SHARD = "sparse-materialization", "heterogeneous-sharding"
PROPHET, SHADOW = "prophet", "shadow"
DEGREE, PARTITION = "pipeline-degree", "gradient-partition"
ASYMMETRIC = "asym-ea"
RATIO = "zebra-ratio"
SHARE = "priced-share"

REPLICATION: dict[str, Any] = {
    "rows": [[10, 2, 3, 1], [8, 4, 2, 2], [9, 1, 4, 2], [7, 3, 3, 3]],
    "owner": [0, 1, 2, 3],
    "num_excluded": 0,
    "balance": 0.5,
    "bytes_per_row": 1,
    "bandwidth": 1,
    "rows_per_second": 2,
    "parameter_bytes": 8,
    "gradient_bytes": 8,
    "forward_non_expert_s": 4,
    "backward_non_expert_s": 8,
    "scheduled": False,
}

BACKWARD: dict[str, Any] = {
    "all_to_all": {"alpha_s": 0.2, "beta_s": 1e-3, "n": 4000},
    "all_gather": {"alpha_s": 0.1, "beta_s": 1e-3, "n": 1000},
    "reduce_scatter": {"alpha_s": 0.1, "beta_s": 1e-3, "n": 1000},
    "expert": {"alpha_s": 0.6, "beta_s": 2e-3, "n": 5000},
    "dense_window_s": 2,
    "gradient_elements": 8000,
}

JOBS: dict[str, dict[str, Any]] = {
    MATERIALIZE: {
        "owner": [0, 0, 1, 1, 2, 2, 3, 3],
        "load": [40, 10, 6, 4, 20, 8, 7, 5],
        "overlap_degree": 3,
        "replicas_per_rank": 1,
        "num_ranks": 4,
        "ranks_per_node": 2,
    },
    SHARD: {
        "load": [[50, 20, 20, 10], [30, 40, 25, 5]],
        "overlap_degree": 1,
        "num_ranks": 4,
        "ranks_per_node": 2,
    },
    PROPHET: REPLICATION,
    SHADOW: {**REPLICATION, "parameter_bytes": 2, "gradient_bytes": 2},
    DEGREE: {
        "all_to_all": {"alpha_s": 0.2, "beta_s": 1e-3, "n": 4000},
        "all_gather": {"alpha_s": 0.1, "beta_s": 1e-3, "n": 1000},
        "reduce_scatter": {"alpha_s": 0.1, "beta_s": 1e-3, "n": 1000},
        "expert": {"alpha_s": 0.3, "beta_s": 1e-3, "n": 5000},
        "gradient_s": 0,
        "max_degree": 8,
    },
    PARTITION: {
        "layers": [BACKWARD] * 3,
        "all_reduce": {"alpha_s": 0.5, "beta_s": 1e-3},
        "tail_elements": 0,
        "max_degree": 8,
    },
    ASYMMETRIC: {
        "num_experts": 24,
        "num_layers": 10,
        "attention_ranks": 4,
        "expert_ranks": 8,
        "attention_s": 6,
        "expert_s": 10,
        "expert_on_attention_s": 8,
        "min_moved": 0,
        "max_moved": None,
    },
    RATIO: {
        "model": {
            "num_layers": 4,
            "num_experts": 12,
            "top_k": 2,
            "width": 4,
            "expert_width": 8,
            "length": 1,
        },
        "attention": {"attention_s": 0.5, "expert_s": 0.8},
        "expert": {"attention_s": 1.5, "expert_s": 1},
        "samples_per_attention_rank": 8,
        "ratios": [[3, 3], [2, 3]],
        "stripes": [2, 8],
        "link": {"bytes_per_s": 160},
    },
    SHARE: {
        "rows": [[10, 2], [8, 4]],
        "holders": [[0, 1], [1]],
        "node": [0, 0],
        "row_s": 1,
        "local_row_s": 0.1,
        "cross_row_s": 1,
    },
}
S1 = {
    "sent": [[{"0": 10}, {"1": 2}], [{"0": 2, "1": 6}, {"1": 4}]],
    "computed": [12, 12],
    "time_s": 12.2,
    "time_nearest_s": 14.2,
}
H2 = {
    "holders": [[0, 1, 2], [0, 3], [1], [1], [0, 2], [2], [3], [3]],
    "received_per_rank": [1, 1, 1, 1],
}
H5 = {"home": [[1, 2, 0, 3], [0, 1, 2, 3]]}
EVERYWHERE = [0, 1, 2, 3]
P1 = {
    "holders": [EVERYWHERE, [1], [2], [3]],
    "selected": [0],
    "time_s": 79.5,
    "time_without_s": 147.0,
    "rows_computed": [10, 18, 21, 15],
    "rows_received": [0, 6, 8, 5],
}
P7 = {
    "holders": [EVERYWHERE, EVERYWHERE, EVERYWHERE, [3]],
    "selected": [0, 2, 1],
    "time_s": 63.5,
    "time_without_s": 147.0,
    "rows_computed": [15, 14, 14, 21],
    "rows_received": [0, 0, 0, 5],
}


def planned(name: str, document: Any) -> Any:
    return json.loads(plan_text(name, json.dumps(document).encode()))


def changed(name: str, **values: Any) -> dict[str, Any]:
    return {**JOBS[name], **values}


def test_goldens() -> None:
    assert set(JOBS) == set(ALGORITHMS)
    assert planned(MATERIALIZE, JOBS[MATERIALIZE]) == H2
    assert planned(SHARD, JOBS[SHARD]) == H5
    assert planned(PROPHET, JOBS[PROPHET]) == P1
    assert planned(SHADOW, JOBS[SHADOW]) == P7
    assert planned(SHARE, JOBS[SHARE]) == S1


def test_shares_that_do_not_pay_are_the_nearest_replicas() -> None:
    """Moving a row costs more than it saves; unlike EP ranks take rows by their speed."""
    dear = planned(SHARE, changed(SHARE, rows=[[10, 0], [8, 4]], local_row_s=3))
    assert dear["time_s"] == dear["time_nearest_s"] == 12
    assert dear["sent"] == [[{"0": 10}, {}], [{"1": 8}, {"1": 4}]]
    unlike = planned(SHARE, changed(SHARE, row_s=[1, 0.5], local_row_s=0))
    assert unlike["computed"] == [8, 16]
    assert unlike["time_s"] == 8


def test_h1_and_h3() -> None:
    h1 = planned(MATERIALIZE, changed(MATERIALIZE, replicas_per_rank=4))
    assert h1["received_per_rank"] == [1, 3, 2, 3]
    assert h1["holders"][:2] == [[0, 1, 2, 3], [0, 1, 2, 3]]
    h3 = planned(MATERIALIZE, changed(MATERIALIZE, overlap_degree=4, replicas_per_rank=2))
    assert h3["received_per_rank"] == [2, 2, 2, 2]
    assert h3["holders"] == [[0, 1, 2, 3], [0, 2], [1], [1], [0, 1, 2, 3], [0, 2], [3], [3]]


def test_p1_and_p2() -> None:
    one_left_out = planned(PROPHET, changed(PROPHET, num_excluded=1))
    assert (one_left_out["holders"][0], one_left_out["time_s"]) == ([0, 1, 2], 75.5)
    scheduled = planned(PROPHET, changed(PROPHET, scheduled=True))
    assert (scheduled["selected"], scheduled["time_s"]) == ([0, 2], 56.0)


def test_ranks_without_rows_are_left_out() -> None:
    rows = [[10, 2, 3, 1], [8, 4, 2, 2], [0, 1, 4, 2], [7, 3, 3, 3]]
    assert planned(PROPHET, changed(PROPHET, rows=rows, num_excluded=None))["holders"][0] == [
        0,
        1,
        3,
    ]


def test_degrees_of_fsmoe() -> None:
    """Its golden test G1: forward, backward, and backward with an all-reduce."""
    forward = planned(DEGREE, JOBS[DEGREE])
    assert (forward["degree"], forward["case"]) == (3, 3)
    assert forward["times_s"][:4] == pytest.approx([15.9, 11.2, 10.0667, 10.3], abs=5e-5)
    assert len(forward["times_s"]) == 8
    assert forward["time_s"] == forward["times_s"][2]
    expert = {"alpha_s": 0.6, "beta_s": 2e-3, "n": 5000}
    backward = planned(DEGREE, changed(DEGREE, expert=expert))
    assert (backward["degree"], backward["case"]) == (4, 2)
    assert backward["time_s"] == pytest.approx(15.5)
    reducing = planned(DEGREE, changed(DEGREE, expert=expert, gradient_s=9))
    assert (reducing["degree"], reducing["case"]) == (2, 1)
    assert reducing["time_s"] == pytest.approx(17.8)
    assert planned(DEGREE, changed(DEGREE, max_degree=2))["degree"] == 2


def test_partition_of_fsmoe() -> None:
    """Its golden tests G2 and G8."""
    plan = planned(PARTITION, JOBS[PARTITION])
    assert (plan["dense"], plan["moe"]) == ([1500] * 3, [5400] * 3)
    assert sum(plan["extra"]) == 3300
    assert plan["degrees"] == [3, 3, 2]
    assert plan["time_s"] == pytest.approx(48.2667, abs=5e-5)
    layers = [{**BACKWARD, "gradient_elements": n} for n in (0, 6900)]
    last = planned(PARTITION, changed(PARTITION, layers=layers, tail_elements=6900))
    assert (last["dense"], last["moe"]) == ([0, 1500], [0, 5400])
    assert (last["extra"], last["degrees"]) == ([0, 0], [4, 4])
    assert last["time_s"] == pytest.approx(2 * 15.5 + 7.4)


def test_asymmetric_assignment_of_hetermoe() -> None:
    """Its golden tests G2 and G3; bounds in experts of all ranks, and of an attention rank."""
    assert planned(ASYMMETRIC, JOBS[ASYMMETRIC]) == {
        "moved_per_expert_rank": [0, 0, 1, 0, 1, 0, 1, 0, 1, 0],
        "chunk": {"per_attention_rank": 2, "per_expert_rank": 1},
    }
    fewer = changed(ASYMMETRIC, expert_ranks=2, num_layers=8)
    assert planned(ASYMMETRIC, fewer) == {
        "moved_per_expert_rank": [2, 4, 4, 2, 4, 4, 4, 2],
        "chunk": {"per_attention_rank": 1, "per_expert_rank": 2},
    }
    printed = planned(ASYMMETRIC, changed(ASYMMETRIC, variant="printed"))
    assert printed["moved_per_expert_rank"] == [0, 0, 1, 0, 1, 0, 1, 0, 0, 1]
    for bound, moved in (({"max_moved": 5}, 2), ({"min_moved": 41}, 6)):
        plan = planned(ASYMMETRIC, changed(ASYMMETRIC, **bound))
        assert sum(plan["moved_per_expert_rank"]) == moved


def test_a_list_of_jobs_is_a_list_of_plans() -> None:
    jobs = [JOBS[MATERIALIZE], changed(MATERIALIZE, overlap_degree=0)]
    first, second = planned(MATERIALIZE, jobs)
    assert first == H2
    assert second["holders"] == [[0], [0], [1], [1], [2], [2], [3], [3]]
    assert planned(SHARD, []) == []


def test_layers_of_different_sizes() -> None:
    plan = planned(SHARD, changed(SHARD, load=[[1], [2, 3], [5, 4, 3]]))
    assert [len(ranks) for ranks in plan["home"]] == [1, 2, 3]
    # Six experts on four ranks.
    assert sorted(chain.from_iterable(plan["home"])) == [0, 0, 1, 1, 2, 3]


def test_loads_may_be_means() -> None:
    """Of 5 steps, say: fifths of rows."""
    fifths = [rows / 5 for rows in JOBS[MATERIALIZE]["load"]]
    assert planned(MATERIALIZE, changed(MATERIALIZE, load=fifths)) == H2


def numbers(values: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
    """Lists and objects that have a number, where in them, and what errors call it."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        name = f"{where}.{key}" if isinstance(values, dict) else f"{where}[{key}]"
        if isinstance(value, (dict, list)):
            yield from numbers(value, name)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield values, key, name


@pytest.mark.parametrize("name", JOBS)
def test_every_number_has_a_type_and_bounds(name: str) -> None:
    job = json.loads(json.dumps(JOBS[name]))
    found = list(numbers(job, "input"))
    assert len(found) > 5
    for holder, key, where in found:
        if name == SHADOW and key == "num_excluded":  # which is not for it
            continue
        before = holder[key]
        for wrong in (True, "7", None, {}):
            holder[key] = wrong
            if wrong is None and key in OPTIONAL:
                continue
            with pytest.raises(ValueError) as caught:
                planned(name, job)
            assert str(caught.value).startswith(f"job: {where} is {wrong!r}, but must be ")
        for wrong in (-1, 10**40):
            holder[key] = wrong
            with pytest.raises(ValueError) as caught:
                planned(name, job)
            assert str(caught.value).startswith("job: ") and len(str(caught.value)) < 300
        holder[key] = before
    assert job == JOBS[name]


OPTIONAL = ("num_excluded", "max_moved", "attention_s", "expert_s")


def bad_jobs() -> list[tuple[str, Any, str]]:
    """Name, job and what must be stated."""
    gather, reduce = JOBS[DEGREE]["all_gather"], JOBS[PARTITION]["all_reduce"]
    changes: list[tuple[str, dict[str, Any], str]] = [
        (MATERIALIZE, {"overlap_degree": -1}, "degree is -1; it must be an integer from 0 to"),
        (MATERIALIZE, {"overlap_degree": 2**63}, "overlap_degree is 9223372036854775808; it must"),
        (MATERIALIZE, {"num_ranks": 0}, "num_ranks is 0; it must be an integer of at least 1"),
        (MATERIALIZE, {"num_ranks": 5}, "num_ranks is 5, which ranks_per_node, 2, does not divide"),
        (MATERIALIZE, {"num_ranks": 10**30}, "are more than 1048576"),
        (MATERIALIZE, {"num_rank": 4}, "has no key 'num_rank'; did you mean 'num_ranks'?"),
        (MATERIALIZE, {"steps": 3}, "has no key 'steps'; known: "),
        (MATERIALIZE, {"load": [1] * 7}, "load has 7 numbers, but owner has 8"),
        (MATERIALIZE, {"owner": [], "load": []}, "load is []"),
        (MATERIALIZE, {"owner": [0] * 7 + [4]}, "owner[7] is 4; it must be an integer from 0 to 3"),
        (SHARD, {"load": []}, "load is []; give a list of loads for each layer"),
        (SHARD, {"load": [[1, 2], []]}, "load[1] is []"),
        (SHARD, {"load": [[1, 2], 3]}, "load[1] is 3"),
        (SHARD, {"load": [[1], [1, 2**33]]}, "load[1][1] is 8589934592.0; it must be a number"),
        (PROPHET, {"rows": []}, "rows is []; give a list of token counts for each rank"),
        (
            PROPHET,
            {"rows": [[]], "owner": []},
            "rows[0] is []; give a list of token counts for each",
        ),
        (PROPHET, {"rows": [[1, 2, 3, 4], [1]]}, "rows[1] has 1 numbers, but owner has 4 ranks"),
        (PROPHET, {"owner": [0, 1, 2]}, "rows[0] has 4 numbers, but owner has 3 ranks; give both"),
        (PROPHET, {"owner": [0, 1, 2, 4]}, "owner[3] is 4; it must be an integer from 0 to 3"),
        (
            PROPHET,
            {"num_excluded": 4},
            "num_excluded is 4, but an expert has 3 EP ranks besides its",
        ),
        (PROPHET, {"num_excluded": -1}, "give a number from 0 to 3, or null for automatic"),
        (PROPHET, {"num_excluded": "auto"}, "write null"),
        (PROPHET, {"bandwidth": 0}, "bandwidth is 0.0; it must be a number from 1e-09 to 1e+18"),
        (PROPHET, {"bytes_per_row": 10**400}, "bytes_per_row is inf; it must be a number from 0"),
        (PROPHET, {"scheduled": 1}, "scheduled is 1, but must be true or false"),
        (SHADOW, {"rows": []}, "rows is []"),
        (DEGREE, {"all_to_all": 3}, "input.all_to_all is 3, but must be an object"),
        (DEGREE, {"all_to_all": {"alpha_s": 1, "beta_s": 1}}, "input.all_to_all needs the key 'n'"),
        (DEGREE, {"all_gather": {**gather, "alpha": 1}}, "did you mean 'alpha_s'?"),
        (DEGREE, {"reduce_scatter": {**gather, "n": 1e19}}, "reduce_scatter.n is 1e+19; it must"),
        (DEGREE, {"max_degree": 0}, "max_degree is 0; it must be an integer from 1 to 4096"),
        (PARTITION, {"layers": []}, "layers has 0 objects; give one for each layer, from 1 to"),
        (PARTITION, {"layers": [BACKWARD] * 1025}, "layers has 1025 objects"),
        (PARTITION, {"all_reduce": {**reduce, "n": 1}}, "input.all_reduce has no key 'n'"),
        (PARTITION, {"tail_elements": 2**41}, "tail_elements is 2199023255552"),
        (PARTITION, {"layers": [BACKWARD, 3]}, "layers[1] is 3, but must be an object"),
        (PARTITION, {"layers": [BACKWARD, {}]}, "layers[1] needs the key 'all_to_all'; add it"),
        (PARTITION, {"solver": "papr"}, "solver is 'papr', which is unknown; did you mean 'paper'"),
        (ASYMMETRIC, {"num_experts": 25}, "num_experts is 25, which expert_ranks, 8, does not"),
        (ASYMMETRIC, {"attention_ranks": 3}, "attention_ranks is 3 and expert_ranks 8, of which"),
        (ASYMMETRIC, {"min_moved": 241}, "min_moved is 241, but 10 layers can give 240 experts, 8"),
        (
            ASYMMETRIC,
            {"min_moved": 9, "max_moved": 3},
            "on each of 4 attention ranks, has room for",
        ),
        (ASYMMETRIC, {"variant": "print"}, "variant is 'print', which is unknown; did you mean"),
        (SHARE, {"rows": []}, "rows are of 0 senders and holders of 2 experts; give at least one"),
        (SHARE, {"rows": [[10, 2], [8]]}, "rows[1] has 1 numbers, but holders are of 2 experts"),
        (SHARE, {"holders": [[0, 1], []]}, "holders[1] is []; give a list of the EP ranks"),
        (
            SHARE,
            {"holders": [[0, 2], [1]]},
            "holders[0][1] is 2; it must be an integer from 0 to 1",
        ),
        (SHARE, {"holders": [[1, 1], [1]]}, "holders[0] is [1, 1]; name each EP rank once"),
        (SHARE, {"node": [0]}, "node has 1 numbers, but rows are of 2 EP ranks; give one for each"),
        (SHARE, {"row_s": [1]}, "row_s has 1 numbers, but rows are of 2 EP ranks"),
        (SHARE, {"row_s": [1, -1]}, "row_s[1] is -1.0; it must be a number from 0 to 1e+18"),
        (SHARE, {"row_s": "1"}, "row_s is '1', but must be a list or a number"),
    ]
    return [
        *((name, changed(name, **values), expected) for name, values, expected in changes),
        *((name, job, "must be an object") for name in JOBS for job in (3, "job", None, True)),
    ]


@pytest.mark.parametrize(("name", "job", "expected"), bad_jobs())
def test_bad_jobs(name: str, job: Any, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        planned(name, job)
    assert expected in str(caught.value)
    assert str(caught.value).startswith("job: ")
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(ValueError, match=r"^job 1: "):
        planned(name, [JOBS[name], job])


@pytest.mark.parametrize("name", JOBS)
def test_every_key_is_needed(name: str) -> None:
    """But those that have a default."""
    for key in JOBS[name].keys() - ({"max_degree"} if name == "gradient-partition" else set()):
        rest = {k: v for k, v in JOBS[name].items() if k != key}
        with pytest.raises(ValueError, match=f"needs the key '{key}'; add it"):
            planned(name, rest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "Expecting value"),
        (b"{'load': 3}", "double quotes"),
        (b'{"load": [NaN]}', "NaN is not a number"),
        (b'{"load": [-Infinity]}', "-Infinity is not a number"),
        (b'{"load": [1]} {}', "Extra data"),
        (b'{"load": [1], "load": [2]}', "a key twice"),
        (b"\xff\xfe\xfa", "decode"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_no_json(text: bytes, expected: str) -> None:
    with pytest.raises(ValueError, match="cannot be read as JSON") as caught:
        plan_text(SHARD, text)
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_an_unknown_algorithm() -> None:
    with pytest.raises(ValueError, match="did you mean 'sparse-materialization'"):
        plan_text("sparse-materialisation", b"{}")
