"""Every layout of up to four stages, two tensor- and two data-parallel ranks, none to three exits: 20 steps.

Writes its evidence to reports/training/parallel_matrix.json. A sample that runs with every change is in
test_parallel.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from parallel_cases import EXITS, UNTIED, Case, oracle, run_here, run_on_ranks, worst, write_seeds
from parallel_worker import Outcome

STEPS = 20
Small = partial(Case, sequences=8)
EVIDENCE = Path(__file__).parents[2] / "reports" / "training" / "parallel_matrix.json"

LAYOUTS = [
    (pipeline, tensor, data, sequence)
    for pipeline, tensor, data in itertools.product((1, 2, 4), (1, 2), (1, 2))
    for sequence in ((False, True) if tensor == 2 else (False,))
]
MATRIX = [
    Small(pipeline, tensor, data, exits, sequence)
    for (pipeline, tensor, data, sequence), exits in itertools.product(LAYOUTS, "0123")
]
HEADS = [
    Small(pipeline=4, exits=exits, exit_forward=order)
    for exits, order in itertools.product([name for name in EXITS if "+" in name], ("deferred", "eager"))
] + [Small(pipeline=2, tensor=2, sequence=True, exits=exits) for exits in EXITS if "+" in exits]
OPTIONS = [
    *(
        Small(pipeline=2, data=2, exits="3", distributed=distributed, overlap=overlap, clip_grad=clip)
        for distributed, overlap in itertools.product((False, True), (False, True))
        for clip in (0.0, 0.5)
    ),
    *(
        Small(pipeline=pipeline, exits="3", recompute=recompute, exit_forward=order)
        for pipeline, recompute, order in itertools.product(
            (1, 2, 4), ("full", "selective"), ("deferred", "eager")
        )
    ),
    Small(pipeline=2, tensor=2, data=2, exits="2", sequence=True, distributed=True, overlap=True),
    Small(
        pipeline=4,
        tensor=2,
        data=2,
        exits="3",
        sequence=True,
        distributed=True,
        overlap=True,
        recompute="full",
    ),
    *(Small(pipeline=pipeline, exits="3", exit_forward="eager") for pipeline in (1, 2, 4)),
]
ALL = list(dict.fromkeys([*MATRIX, *HEADS, *OPTIONS]))


def run_all(cases: Sequence[Case], seeds: dict[tuple[str, str], str]) -> Iterator[dict[Case, Outcome]]:
    """Every case, those of one world size in one launch; what has run so far, after each launch."""
    outcomes: dict[Case, Outcome] = {}
    for size in sorted({case.world_size for case in cases}):
        mine = [case for case in cases if case.world_size == size]
        works = [case.work(STEPS, seeds) for case in mine]
        found = run_here(works) if size == 1 else run_on_ranks(works, nproc=size)
        outcomes |= dict(zip(mine, found, strict=True))
        yield outcomes


def same_but_for_stages(case: Case, outcomes: dict[Case, Outcome]) -> list[Outcome]:
    """Runs that differ from ``case`` in the number of stages, in when exits run and in recompute only."""

    def key(one: Case) -> Case:
        return replace(one, pipeline=1, exit_forward="deferred", recompute=None)

    return [outcome for other, outcome in outcomes.items() if key(other) == key(case)]


def check(case: Case, outcomes: dict[Case, Outcome], expected: list[dict[str, float]]) -> dict[str, Any]:
    """What there is to say of a case."""
    outcome = outcomes[case]
    first, any_step = worst(outcome, expected)
    alike = same_but_for_stages(case, outcomes)
    order = replace(case, exit_forward="eager" if case.exit_forward == "deferred" else "deferred")
    return {
        "case": case.label(),
        "ranks": case.world_size,
        "clip_grad": case.run(STEPS).training.clip_grad,
        "step_1": first,
        "any_of_20_steps": any_step,
        "tensors_compared_per_step": outcome.num_copies,
        "copies_that_differed": len(outcome.differing),
        "step_1_bitwise_as_other_stages": all(other.losses[0] == outcome.losses[0] for other in alike),
        "all_bitwise_as_other_stages": (
            all(other.digests == outcome.digests for other in alike) if case.exits in UNTIED else None
        ),
        "bitwise_eager_and_deferred": (
            outcomes[order].digests == outcome.digests if order in outcomes else None
        ),
    }


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_every_layout_trains_as_one_process_does(tmp_path: Path) -> None:
    seeds = write_seeds(tmp_path, ALL)
    expected: dict[Any, list[dict[str, float]]] = {}
    rows: list[dict[str, Any]] = []
    EVIDENCE.parent.mkdir(parents=True, exist_ok=True)
    for outcomes in run_all(ALL, seeds):
        rows.clear()
        for case in outcomes:
            clip = case.run(STEPS).training.clip_grad
            if (case.exits, clip) not in expected:
                alone = Small(exits=case.exits, clip_grad=clip)
                expected[case.exits, clip] = oracle(alone, STEPS, seeds[case.exits, "fp32"])
            rows.append(check(case, outcomes, expected[case.exits, clip]))
        EVIDENCE.write_text(json.dumps({"steps": STEPS, "cases": rows}, indent=1) + "\n")
    for row in rows:
        assert row["step_1"] < 1e-6, row
        assert row["any_of_20_steps"] < 1e-4, row
        assert row["copies_that_differed"] == 0, row
        assert row["step_1_bitwise_as_other_stages"], row
        assert row["all_bitwise_as_other_stages"] is not False, row
        assert row["bitwise_eager_and_deferred"] is not False, row
    assert len(rows) == len(ALL)
