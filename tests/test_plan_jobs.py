"""Planners as jobs in JSON: good input, and every kind of bad input in one line."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest

from ds_moe_ext.plan_jobs import ALGORITHMS, plan_text

MATERIALIZE, SHARD = "sparse-materialization", "heterogeneous-sharding"

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
}
H2 = {
    "holders": [[0, 1, 2], [0, 3], [1], [1], [0, 2], [2], [3], [3]],
    "received_per_rank": [1, 1, 1, 1],
}
H5 = {"home": [[1, 2, 0, 3], [0, 1, 2, 3]]}


def planned(name: str, document: Any) -> Any:
    return json.loads(plan_text(name, json.dumps(document).encode()))


def changed(name: str, **values: Any) -> dict[str, Any]:
    return {**JOBS[name], **values}


def test_goldens() -> None:
    assert set(JOBS) == set(ALGORITHMS)
    assert planned(MATERIALIZE, JOBS[MATERIALIZE]) == H2
    assert planned(SHARD, JOBS[SHARD]) == H5


def test_h1_and_h3() -> None:
    h1 = planned(MATERIALIZE, changed(MATERIALIZE, copies_per_rank=4))
    assert h1["received_per_rank"] == [1, 3, 2, 3]
    assert h1["holders"][:2] == [[0, 1, 2, 3], [0, 1, 2, 3]]
    h3 = planned(MATERIALIZE, changed(MATERIALIZE, overlap_degree=4, copies_per_rank=2))
    assert h3["received_per_rank"] == [2, 2, 2, 2]
    assert h3["holders"] == [[0, 1, 2, 3], [0, 2], [1], [1], [0, 1, 2, 3], [0, 2], [3], [3]]


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
    both: list[tuple[dict[str, Any], str]] = [
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
    loads = [-1, True, "7", None, [7], {}, 2**33, 1e300, 10**400]
    return [
        *((name, changed(name, **values), says) for name in JOBS for values, says in both),
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
