"""Training in parallel: a sample of layouts and options, each against one process.

The whole matrix is in test_parallel_matrix (long).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from parallel_cases import Case, oracle, run_here, run_on_ranks, worst, write_seeds
from parallel_worker import Outcome

STEPS = 3
Small = partial(Case, sequences=8)

SAMPLE = [
    Small(pipeline=2, tensor=2, exits="3", sequence=True),
    Small(pipeline=2, data=2, exits="2", distributed=True, overlap=True),
    Small(tensor=2, data=2, exits="2", sequence=True, distributed=True),
    Small(pipeline=4, exits="3", exit_forward="eager", recompute="full"),
    Small(pipeline=4, exits="2", recompute="selective"),
]
"""Held against the oracle."""

SPLIT = Small(exits="1", dropout=0.1)
FILLED = Small(pipeline=2, data=2, exits="2", fill=(1, 1), clip_grad=0.0)
OVERFLOWING = Small(pipeline=2, tensor=2, exits="3", precision="fp16", sequence=True, overflow=(3, 2))
POISONED = Small(
    pipeline=2, data=2, exits="2", distributed=True, overlap=True, clip_grad=0.0, overflow=(3, 2)
)
"""In fp32: a gradient that is not finite, found while it is being reduced."""
ONE_STEP = replace(POISONED, overflow=None, stop_after=1)
MASKED = Small(pipeline=2, tensor=2, exits="2", dropout=0.1)
"""Tensor-parallel ranks must draw the same masks for what they all hold."""
ON_FOUR_RANKS = [
    *SAMPLE,
    replace(SPLIT, pipeline=4),
    replace(SPLIT, pipeline=4, recompute="full", exit_forward="eager"),
    MASKED,
    replace(MASKED, sequence=True),
    FILLED,
    replace(FILLED, distributed=True, overlap=True),
    OVERFLOWING,
    replace(OVERFLOWING, pipeline=1, data=2, distributed=True, overlap=True),
    POISONED,
    ONE_STEP,
]
IN_ONE_PROCESS = [
    SPLIT,
    replace(SPLIT, exit_forward="eager"),
    replace(SPLIT, recompute="selective"),
    replace(SPLIT, dropout=0.0),
    *(replace(Small(exits="3"), exit_forward=order) for order in ("deferred", "eager")),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    """Every case above, run."""
    seeds = write_seeds(tmp_path_factory.mktemp("seeds"), [*ON_FOUR_RANKS, *IN_ONE_PROCESS])

    here = run_here([case.work(STEPS, seeds) for case in IN_ONE_PROCESS])
    there = run_on_ranks([case.work(STEPS, seeds) for case in ON_FOUR_RANKS], nproc=4)
    return dict(zip([*IN_ONE_PROCESS, *ON_FOUR_RANKS], [*here, *there], strict=True))


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    return write_seeds(tmp_path_factory.mktemp("oracle"), SAMPLE)


def test_losses_are_those_of_one_process(
    outcomes: dict[Case, Outcome], seeds: dict[tuple[str, str], str]
) -> None:
    expected = {exits: oracle(Small(exits=exits), STEPS, seeds[exits, "fp32"]) for exits in ("2", "3")}
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
        outcomes[replace(Small(exits="3"), exit_forward=order)] for order in ("deferred", "eager")
    )
    assert deferred.digests == eager.digests


def test_filled_bubbles_are_reduced_early_to_the_same_bits(outcomes: dict[Case, Outcome]) -> None:
    early = outcomes[replace(FILLED, distributed=True, overlap=True)]
    assert early.losses == outcomes[FILLED].losses
    assert early.digests == outcomes[FILLED].digests


def test_an_overflow_on_one_rank_skips_the_step_on_all(outcomes: dict[Case, Outcome]) -> None:
    for case, outcome in outcomes.items():
        if case.precision == "fp16":
            assert outcome.skipped == [False, True, False], case.label()
            assert outcome.loss_scales == [4096.0, 4096.0, 2048.0], case.label()
    # All losses are scaled alike on every stage, and the gradient's scale is taken out again.
    half, single = outcomes[OVERFLOWING], outcomes[SAMPLE[0]]
    assert half.grad_norms[0] == pytest.approx(single.grad_norms[0], rel=0.02)
    assert half.losses[0] == pytest.approx(single.losses[0], rel=0.01)


def test_a_bad_gradient_stops_all_ranks_although_its_reduction_has_begun(
    outcomes: dict[Case, Outcome],
) -> None:
    stopped, one_step = outcomes[POISONED], outcomes[ONE_STEP]
    assert "(a sum over data-parallel ranks) on rank" in stopped.error
    assert "in iteration 2 is not finite; no parameter was changed" in stopped.error
    assert stopped.digests == one_step.digests
    assert one_step.error == ""


def test_the_seed_checkpoints_differ_by_exits(seeds: dict[tuple[str, str], str]) -> None:
    assert len({Path(folder) for folder in seeds.values()}) == len(seeds)
