"""Training in parallel: a sample of layouts and options, each against one process.

The whole matrix is in test_parallel_matrix (long).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from parallel_cases import Case, oracle, run_here, run_on_ranks, worst, write_seeds
from parallel_worker import Outcome, Work

STEPS = 4

SAMPLE = [
    Case(pipeline=2, tensor=2, exits="3", sequence=True),
    Case(pipeline=2, data=2, exits="2", distributed=True, overlap=True),
    Case(tensor=2, data=2, exits="2", sequence=True, distributed=True),
    Case(pipeline=4, exits="3", exit_forward="eager", recompute="full"),
    Case(pipeline=4, exits="2", recompute="selective"),
    Case(pipeline=2, data=2, exits="3", overlap=True),
]
"""Held against the oracle."""

SPLIT = Case(exits="1", dropout=0.1)
FILLED = Case(pipeline=2, data=2, exits="2", fill=(1, 1), clip_grad=0.0)
OVERFLOWING = Case(pipeline=2, tensor=2, exits="3", precision="fp16", sequence=True)
ON_FOUR_RANKS = [
    *SAMPLE,
    replace(SPLIT, pipeline=4),
    replace(SPLIT, pipeline=4, recompute="full", exit_forward="eager"),
    FILLED,
    replace(FILLED, distributed=True, overlap=True),
    OVERFLOWING,
    replace(OVERFLOWING, pipeline=1, data=2, distributed=True, overlap=True),
]
IN_ONE_PROCESS = [
    SPLIT,
    replace(SPLIT, exit_forward="eager"),
    replace(SPLIT, recompute="selective"),
    replace(SPLIT, dropout=0.0),
    *(replace(Case(exits="3"), exit_forward=order) for order in ("deferred", "eager")),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    """Every case above, run."""
    seeds = write_seeds(tmp_path_factory.mktemp("seeds"), [*ON_FOUR_RANKS, *IN_ONE_PROCESS])

    def work(case: Case) -> Work:
        overflow = (3, 2) if case.precision == "fp16" else None
        return Work(case.document(STEPS), STEPS, seeds[case.exits, case.precision], overflow)

    here = run_here([work(case) for case in IN_ONE_PROCESS])
    there = run_on_ranks([work(case) for case in ON_FOUR_RANKS], nproc=4)
    return dict(zip([*IN_ONE_PROCESS, *ON_FOUR_RANKS], [*here, *there], strict=True))


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    return write_seeds(tmp_path_factory.mktemp("oracle"), SAMPLE)


def test_losses_are_those_of_one_process(
    outcomes: dict[Case, Outcome], seeds: dict[tuple[str, str], str]
) -> None:
    expected = {exits: oracle(Case(exits=exits), STEPS, seeds[exits, "fp32"]) for exits in ("2", "3")}
    for case in SAMPLE:
        first, any_step = worst(outcomes[case], expected[case.exits])
        assert first < 1e-6, case.label()
        assert any_step < 1e-4, case.label()
    # Negative control: the other set of exits is another model.
    assert abs(outcomes[SAMPLE[0]].losses[-1]["final"] / expected["2"][-1]["final"] - 1) > 1e-4


def test_copies_stay_bitwise_equal(outcomes: dict[Case, Outcome]) -> None:
    for case, outcome in outcomes.items():
        assert outcome.differing == [], case.label()
        if case.tensor > 1 or case.data > 1:
            assert outcome.num_copies > len(outcome.digests), "nothing was compared"


def test_splitting_layers_changes_no_bit_and_no_mask(outcomes: dict[Case, Outcome]) -> None:
    """With dropout on: its masks depend on neither stages, nor when exits run, nor recompute."""
    base = outcomes[SPLIT]
    same = [
        case
        for case in outcomes
        if replace(case, pipeline=1, exit_forward="deferred", recompute=None) == SPLIT
    ]
    assert len(same) == 5
    for case in same:
        assert outcomes[case].losses == base.losses, case.label()
        assert outcomes[case].digests == base.digests, case.label()
    # Negative control: there were masks.
    assert outcomes[replace(SPLIT, dropout=0.0)].losses[0] != base.losses[0]


def test_eager_exits_give_the_same_bits_with_tied_matrices(outcomes: dict[Case, Outcome]) -> None:
    deferred, eager = (
        outcomes[replace(Case(exits="3"), exit_forward=order)] for order in ("deferred", "eager")
    )
    assert deferred.digests == eager.digests


def test_filled_bubbles_are_reduced_early_to_the_same_bits(outcomes: dict[Case, Outcome]) -> None:
    early = outcomes[replace(FILLED, distributed=True, overlap=True)]
    assert early.losses == outcomes[FILLED].losses
    assert early.digests == outcomes[FILLED].digests


def test_an_overflow_on_one_rank_skips_the_step_on_all(outcomes: dict[Case, Outcome]) -> None:
    for case, outcome in outcomes.items():
        if case.precision == "fp16":
            assert outcome.skipped == [False, True, False, False], case.label()
            assert outcome.loss_scales == [4096.0, 4096.0, 2048.0, 2048.0], case.label()
            assert outcome.losses[-1]["final"] < outcome.losses[0]["final"] + 0.1


def test_the_seed_checkpoints_differ_by_exits(seeds: dict[tuple[str, str], str]) -> None:
    assert len({Path(folder) for folder in seeds.values()}) == len(seeds)
