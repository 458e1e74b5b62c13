"""With the corrections the filled gradient is unbiased, exactly; without them it is not.

A toy pipeline in exact arithmetic: stage k owns one parameter t_k, the hidden value after it is
x t_0 ... t_k, and its loss is w_k (h_k - y)^2 / 2. All ways to draw an iteration's microbatches from a small
data set are enumerated, and each is run by interpreting the filled schedule, instruction by instruction, with
the rules that the runtime follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from builders import make_plan, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import ScheduleError
from eeplan.plan import Plan
from eeplan.sim.estimator import Corrections, check_estimator, corrections, counted_corrections
from eeplan.sim.fill import Fill, filled
from eeplan.sim.schedule import Op, Schedule

Sample = tuple[Fraction, Fraction]
DATA: list[Sample] = [(Fraction(2), Fraction(-1)), (Fraction(1, 3), Fraction(5))]


def parameters(num_stages: int) -> list[Fraction]:
    return [Fraction(2 * k + 3, k + 2) for k in range(num_stages)]


def weights(num_stages: int) -> list[Fraction]:
    """Every stage has a loss; the last one is the final loss."""
    return [Fraction(k + 1, num_stages + 1) for k in range(num_stages - 1)] + [Fraction(1)]


def full_gradient(num_stages: int) -> list[Fraction]:
    """Of the mean loss over the data, term by term: dh_k/dt_j is h_k / t_j."""
    theta, w = parameters(num_stages), weights(num_stages)
    gradient = [Fraction(0)] * num_stages
    for x, y in DATA:
        h = x
        for k in range(num_stages):
            h *= theta[k]
            for j in range(k + 1):
                gradient[j] += w[k] * (h - y) * h / theta[j] / len(DATA)
    return gradient


def iteration_gradient(schedule: Schedule, draw: Sequence[Sample], factors: Corrections) -> list[Fraction]:
    """The gradient of every stage that one iteration accumulates, by the runtime's rules."""
    num_stages = schedule.num_stages
    theta, w = parameters(num_stages), weights(num_stages)
    scale = [Fraction(s).limit_denominator(10**6) for s in factors.gradient_scales]
    weight = [a * Fraction(f).limit_denominator(10**6) for a, f in zip(w, factors.loss_factors, strict=True)]
    gradient = [Fraction(0)] * num_stages
    inputs: dict[tuple[int, int], Fraction] = {}
    received: dict[tuple[int, int], Fraction] = {}
    positions = [0] * num_stages
    while any(p < len(schedule.stages[s]) for s, p in enumerate(positions)):
        for stage, program in enumerate(schedule.stages):
            while positions[stage] < len(program):
                instruction = program[positions[stage]]
                m, op = instruction.microbatch, instruction.op
                kind = schedule.kind(m)
                x, y = draw[m]
                if op is Op.RECV_FORWARD and (stage, m) not in inputs:
                    break
                if op is Op.RECV_BACKWARD and (stage, m) not in received:
                    break
                if op is Op.FORWARD:
                    inputs.setdefault((stage, m), x)
                if op is Op.SEND_FORWARD:
                    inputs[stage + 1, m] = inputs[stage, m] * theta[stage]
                if op is Op.BACKWARD:
                    h = inputs[stage, m] * theta[stage]
                    # The stage's gradients are scaled as a whole; an insert must come out of that unscaled.
                    root = 1 / scale[stage] if kind.name == "warm_up" else Fraction(1)
                    later = Fraction(0)
                    if kind.has(Op.RECV_BACKWARD, stage):
                        later = received[stage, m]
                        if kind.name == "warm_up":
                            later *= scale[stage + 1] / scale[stage]
                    total = root * weight[stage] * (h - y) / factors.num_full + later
                    gradient[stage] += total * inputs[stage, m]
                    if stage > 0:
                        received[stage - 1, m] = total * theta[stage]
                positions[stage] += 1
    return [g * s for g, s in zip(gradient, scale, strict=True)]


def expectation(schedule: Schedule, factors: Corrections) -> list[Fraction]:
    """Mean over all equally likely draws of the iteration's microbatches."""
    draws = list(product(DATA, repeat=schedule.num_microbatches))
    gradients = [iteration_gradient(schedule, draw, factors) for draw in draws]
    return [sum(column, Fraction(0)) / len(draws) for column in zip(*gradients, strict=True)]


CASES = [
    (2, Fill(2, (1,), (1,))),
    (3, Fill(2, (2, 1), ())),
    (3, Fill(1, (), (2, 1))),
    (3, Fill(2, (2, 1), (2, 1))),
    (4, Fill(2, (3, 2), (3, 1))),
    (4, Fill(1, (3, 3), (3, 3))),
]


@pytest.mark.parametrize(("num_stages", "fill"), CASES)
def test_the_expected_gradient_is_the_full_gradient(num_stages: int, fill: Fill) -> None:
    factors = corrections(fill, num_stages)
    assert expectation(filled(num_stages, fill), factors) == full_gradient(num_stages)


@pytest.mark.parametrize(("num_stages", "fill"), CASES)
def test_without_corrections_it_is_biased(num_stages: int, fill: Fill) -> None:
    """Negative control, each of the two left out in turn wherever it says something."""
    factors, ones = corrections(fill, num_stages), (1.0,) * num_stages
    for without in (replace(factors, loss_factors=ones), replace(factors, gradient_scales=ones)):
        if without != factors:
            assert expectation(filled(num_stages, fill), without) != full_gradient(num_stages)


def test_scaling_inserts_like_the_others_would_be_biased() -> None:
    """The formulas of the two regions side by side miss A T / ((F + A) (F + T)) where the regions overlap."""
    fill, num_stages = Fill(2, (2,), (2,)), 3
    factors = corrections(fill, num_stages)
    # Stage 1, losses of stage 1: F = 2, A = 1, T = 1.
    side_by_side = factors.loss_factors[1] * factors.gradient_scales[1] * (2 + 1 + 1) / 2
    assert side_by_side - 1 == pytest.approx(-1 * 1 / (3 * 3))
    correct = factors.loss_factors[1] * (factors.gradient_scales[1] * (2 + 1) + 1) / 2
    assert correct == pytest.approx(1)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_pair_of_stage_and_loss_counts_once(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(2, 12))
    lengths = st.lists(st.integers(1, num_stages - 1), max_size=8)
    depths, reaches = (tuple(sorted(data.draw(lengths), reverse=True)) for _ in range(2))
    fill = Fill(data.draw(st.integers(1, 40)), depths, reaches)
    factors = corrections(fill, num_stages)
    assert counted_corrections(filled(num_stages, fill)) == factors
    for j in range(num_stages):
        for k in range(j, num_stages):
            seen = fill.num_full + sum(reach >= num_stages - j for reach in reaches)
            inserts = sum(depth > k for depth in depths)
            counted = factors.loss_factors[k] * (factors.gradient_scales[j] * seen + inserts)
            assert counted / fill.num_full == pytest.approx(1)


def test_one_region_gives_the_papers_factors() -> None:
    """Facts 4: M / N_k for the losses of region A, M / N_j for the gradients of region B."""
    assert corrections(Fill(6, (2, 1), ()), 4).loss_factors == (6 / 8, 6 / 7, 1, 1)
    assert corrections(Fill(6, (), (2, 1)), 4).gradient_scales == (1, 1, 6 / 7, 6 / 8)
    plain = corrections(Fill(6), 4)
    assert plain.loss_factors == plain.gradient_scales == (1, 1, 1, 1)


def plan_of_four_stages() -> Plan:
    run = make_run(
        parallel__pipeline_model_parallel_size=4,
        training__global_batch_size=12,
        exits={"layers": [{"layer": 2}, {"layer": 4}]},
    )
    return make_plan(run)


def test_a_schedule_that_the_plan_does_not_expect_is_refused() -> None:
    """Negative controls: a wrong fill count on either side."""
    plan = plan_of_four_stages()
    check_estimator(filled(4, Fill(6)), plan)
    with pytest.raises(
        ScheduleError, match=r"stage 3: the plan scales its gradients by 1, .* ask for 0\.857"
    ):
        check_estimator(filled(4, Fill(6, (), (1,))), plan)
    with pytest.raises(ScheduleError, match=r"exit after 2 layers: effective weight 0\.25, .* ask for 0\.21"):
        check_estimator(filled(4, Fill(6, (1,))), plan)
    with pytest.raises(ScheduleError, match="the schedule has 3 stages"):
        check_estimator(filled(3, Fill(6)), plan)


def test_unequal_full_microbatches_are_refused() -> None:
    schedule = filled(2, Fill(3, (1,)))
    first = tuple(i for i in schedule.stages[0] if str(i) != "B2")
    with pytest.raises(ScheduleError, match="stage 1 has 3 backwards of full microbatches, stage 0 has 2"):
        counted_corrections(replace(schedule, stages=(first, schedule.stages[1])))
