"""Planners as jobs in JSON: good input, and every kind of bad input in one line."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest

from ds_moe_ext.plan_jobs import ALGORITHMS, plan_text

MATERIALIZE, SHARD = "sparse-materialization", "heterogeneous-sharding"
PROPHET, SHADOW = "prophet", "shadow"

REPLICATION: dict[str, Any] = {
    "rows": [[10, 2, 3, 1], [8, 4, 2, 2], [9, 1, 4, 2], [7, 3, 3, 3]],
    "home": [0, 1, 2, 3],
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

JOBS: dict[str, dict[str, Any]] = {
    MATERIALIZE: {
        "home": [0, 0, 1, 1, 2, 2, 3, 3],
        "load": [40, 10, 6, 4, 20, 8, 7, 5],
        "overlap_degree": 3,
        "copies_per_rank": 1,
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


def test_h1_and_h3() -> None:
    h1 = planned(MATERIALIZE, changed(MATERIALIZE, copies_per_rank=4))
    assert h1["received_per_rank"] == [1, 3, 2, 3]
    assert h1["holders"][:2] == [[0, 1, 2, 3], [0, 1, 2, 3]]
    h3 = planned(MATERIALIZE, changed(MATERIALIZE, overlap_degree=4, copies_per_rank=2))
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


def bad_jobs() -> list[tuple[str, Any, str]]:
    """Name, job and what must be said."""
    hecate: list[tuple[dict[str, Any], str]] = [
        ({"overlap_degree": -1}, "overlap_degree is -1; it must be an integer of at least 0"),
        ({"overlap_degree": True}, "overlap_degree is True"),
        ({"overlap_degree": 1.5}, "overlap_degree is 1.5"),
        ({"overlap_degree": "1"}, "overlap_degree is '1'"),
        ({"overlap_degree": None}, "overlap_degree is None"),
        ({"num_ranks": 0}, "num_ranks is 0; it must be an integer of at least 1"),
        ({"num_ranks": 5}, "num_ranks is 5, which ranks_per_node, 2, does not divide"),
        ({"num_ranks": 10**30}, "are more than 1048576"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"ranks_per_node": False}, "ranks_per_node is False"),
        ({"ranks_per_node": 8}, "does not divide"),
        ({"load": 3}, "load is 3, but must be a list"),
        ({"load": []}, "[]"),
        ({"steps": 3}, "has no key 'steps'; known: "),
        ({"num_rank": 4}, "has no key 'num_rank'; did you mean 'num_ranks'?"),
    ]
    replication: list[tuple[dict[str, Any], str]] = [
        ({"rows": []}, "rows is []; give a list of rows for each rank"),
        ({"rows": 3}, "rows is 3, but must be a list"),
        ({"rows": [[]], "home": []}, "rows[0] is []; give a list of rows for each expert"),
        ({"rows": [[1, 2, 3, 4], 3]}, "rows[1] is 3"),
        ({"rows": [[1, 2, 3, 4], [1, 2, 3]]}, "rows[1] has 3 numbers, but home has 4 ranks"),
        ({"home": [0, 1, 2]}, "rows[0] has 4 numbers, but home has 3 ranks; give both one for"),
        ({"home": [0, 1, 2, 4]}, "home[3] is 4; it must be an integer from 0 to 3"),
        ({"home": [0, 1, 2, -1]}, "home[3] is -1"),
        ({"home": [0, 1, 2, 3.0]}, "home[3] is 3.0"),
        ({"num_excluded": 4}, "num_excluded is 4, but an expert has 3 cells besides its home"),
        ({"num_excluded": -1}, "give a number from 0 to 3, or null for automatic"),
        ({"num_excluded": 0.5}, "num_excluded is 0.5, but must be an integer or null"),
        ({"num_excluded": "auto"}, "write null"),
        ({"balance": -1}, "balance is -1.0; it must be a number from 0"),
        ({"bandwidth": 0}, "bandwidth is 0.0; it must be a number from 1e-09 to 1e+18"),
        ({"rows_per_second": 0}, "rows_per_second is 0.0"),
        ({"rows_per_second": -2}, "rows_per_second is -2.0"),
        ({"bytes_per_row": 10**400}, "bytes_per_row is inf; it must be a number from 0 to 1e+18"),
        ({"parameter_bytes": -8}, "parameter_bytes is -8.0"),
        ({"gradient_bytes": "8"}, "gradient_bytes is '8', but must be a number"),
        ({"forward_non_expert_s": -4}, "forward_non_expert_s is -4.0"),
        ({"backward_non_expert_s": None}, "backward_non_expert_s is None"),
        ({"scheduled": 1}, "scheduled is 1, but must be true or false"),
        ({"bandwith": 1}, "has no key 'bandwith'; did you mean 'bandwidth'?"),
        *(({"rows": [[1, 2, 3, x]]}, "rows[0][3] is ") for x in [-1, 1.5, True, None, 2**33]),
    ]
    loads = [-1, True, "7", None, [7], {}, 2**33, 1e300, 10**400]
    return [
        *((name, changed(name, **v), says) for name in (MATERIALIZE, SHARD) for v, says in hecate),
        *((PROPHET, changed(PROPHET, **values), says) for values, says in replication),
        (SHADOW, changed(SHADOW, rows=[]), "rows is []"),
        *((MATERIALIZE, changed(MATERIALIZE, load=[1] * 7 + [x]), "load[7] is ") for x in loads),
        *((SHARD, changed(SHARD, load=[[1], [1, x]]), "load[1][1] is ") for x in loads),
        (MATERIALIZE, changed(MATERIALIZE, load=[1] * 7), "load has 7 numbers, but home has 8"),
        (MATERIALIZE, changed(MATERIALIZE, home=[], load=[]), "load is []"),
        (MATERIALIZE, changed(MATERIALIZE, home=[0] * 7 + [4]), "home[7] is 4; it must be an"),
        (MATERIALIZE, changed(MATERIALIZE, home=[0] * 7 + [-1]), "from 0 to 3"),
        (MATERIALIZE, changed(MATERIALIZE, home=[0] * 7 + [True]), "home[7] is True"),
        (MATERIALIZE, changed(MATERIALIZE, home=[0] * 7 + [1.0]), "home[7] is 1.0"),
        (MATERIALIZE, changed(MATERIALIZE, copies_per_rank=-2), "copies_per_rank is -2"),
        (SHARD, changed(SHARD, load=[[1, 2], []]), "load[1] is []"),
        (SHARD, changed(SHARD, load=[[1, 2], 3]), "load[1] is 3"),
        *((name, job, "must be an object") for name in JOBS for job in (3, "job", None, True)),
    ]


@pytest.mark.parametrize(("name", "job", "says"), bad_jobs())
def test_bad_jobs(name: str, job: Any, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        planned(name, job)
    assert says in str(caught.value)
    assert str(caught.value).startswith("job: ")
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(ValueError, match=r"^job 1: "):
        planned(name, [JOBS[name], job])


@pytest.mark.parametrize("name", JOBS)
def test_every_key_is_needed(name: str) -> None:
    for key in JOBS[name]:
        rest = {k: v for k, v in JOBS[name].items() if k != key}
        with pytest.raises(ValueError, match=f"needs the key '{key}'; add it"):
            planned(name, rest)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "Expecting value"),
        (b"{'load': 3}", "double quotes"),
        (b'{"load": [NaN]}', "NaN is no number"),
        (b'{"load": [-Infinity]}', "-Infinity is no number"),
        (b'{"load": [1]} {}', "Extra data"),
        (b'{"load": [1], "load": [2]}', "a key twice"),
        (b"\xff\xfe\xfa", "decode"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_no_json(text: bytes, says: str) -> None:
    with pytest.raises(ValueError, match="cannot be read as JSON") as caught:
        plan_text(SHARD, text)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_an_unknown_algorithm() -> None:
    with pytest.raises(ValueError, match="did you mean 'sparse-materialization'"):
        plan_text("sparse-materialisation", b"{}")
