"""The benchmark's result has its promised form; its targets are a campaign."""

from __future__ import annotations

import json

import pytest

from eeplan.bench import SIZES, bench_sim

EVALUATORS = ("closed_form", "recurrence", "rendezvous", "engine")
TARGETS = {
    "closed_form": {(4, 64): 1e7, (64, 1024): 1e6},
    "recurrence": {(4, 64): 2e6, (8, 128): 5e5, (64, 1024): 5e3},
    "rendezvous": {(4, 64): 2e5, (8, 128): 5e4, (64, 1024): 6e2},
    "engine": {(64, 1024): 1 / 1.5},
}
"""Evaluations per second on two cores, one process."""


def test_result_names_every_evaluator_and_size() -> None:
    result = json.loads(json.dumps(bench_sim(sizes=((2, 3), (3, 40)))))
    assert [(c["evaluator"], c["p"], c["m"]) for c in result["cases"]] == [
        (evaluator, p, m) for p, m in ((2, 3), (3, 40)) for evaluator in EVALUATORS
    ]
    assert all(case["configs_per_s"] > 0 for case in result["cases"])


def test_speed_is_what_the_clock_says() -> None:
    """A clock that ticks a second per look: one run within each reading, two looks each."""
    ticks = iter(range(10**6))
    engine = bench_sim(sizes=((2, 3),), clock=lambda: float(next(ticks)))["cases"][-1]
    assert engine["configs_per_s"] == 0.5


@pytest.mark.long
def test_targets() -> None:
    cases = bench_sim()["cases"]
    assert {(c["p"], c["m"]) for c in cases} == set(SIZES)
    slow = [c for c in cases if c["configs_per_s"] < TARGETS[c["evaluator"]].get((c["p"], c["m"]), 0.0)]
    assert slow == []
