"""Thresholds keep their promise on fresh data as often as stated, and would not without the tests.

Truth is known: the source of units is a finite population drawn from with replacement, or a distribution with
a given mean. Each campaign calibrates on 200 independent draws.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom

from eeplan.runtime.decode.quality import Outcomes
from eeplan.runtime.decode.risk_control import (
    GRID,
    P_VALUES,
    Judged,
    betting,
    exit_path,
    fixed_sequence,
    hoeffding_bentkus,
    last_passed,
    least_units,
    single_settings,
)

RISK, ERROR, DRAWS = 0.05, 0.1, 200
ALLOWED = int(binom.ppf(0.999, DRAWS, ERROR))
"""A promise kept exactly as stated is broken more often in one campaign of a thousand."""


def population(seed: int, units: int = 4000, tokens: int = 20, exits: int = 2) -> Judged:
    """Units of ``tokens`` tokens; hard units err together, so tokens of one unit depend on each other."""
    rng = np.random.default_rng(seed)
    count = units * tokens
    hardness_N = np.repeat(rng.beta(0.3, 2.0, units), tokens)
    confidence = np.ones((exits + 1, count))
    final = rng.integers(0, 5, count)
    predicted = np.tile(final, (exits + 1, 1))
    for exit_index in range(exits):
        confidence[exit_index] = rng.random(count)
        chance_N = hardness_N * (1.2 - confidence[exit_index]) * 0.4**exit_index
        wrong_N = rng.random(count) < chance_N
        predicted[exit_index] = np.where(wrong_N, final + 1, final)
    outcomes = Outcomes(
        cross_entropy_EN=np.zeros((exits + 1, count)),
        predicted_EN=predicted,
        probability_EN=confidence,
        confidence_EN=confidence,
        label_N=final,
    )
    return Judged(outcomes, np.repeat(np.arange(units), tokens), "disagreement")


@cache
def loss_table(seed: int) -> NDArray[np.float64]:
    """[settings, units] losses of the whole population at every single threshold."""
    judged = population(seed)
    return np.stack([judged.losses(setting) for setting in single_settings(judged.num_exits)])


class Table:
    """Losses looked up instead of computed: the units of one draw."""

    def __init__(self, losses_SU: NDArray[np.float64]) -> None:
        self.losses_SU = losses_SU

    def losses(self, setting: tuple[float, ...]) -> NDArray[np.float64]:
        return self.losses_SU[GRID.index(setting[0])]


def broken_promises(choose: object, units: int, seed: int = 0) -> int:
    """In how many of 200 draws the chosen threshold's true risk is above the stated one."""
    assert callable(choose)
    table, rng, broken = loss_table(seed), np.random.default_rng(seed + 1), 0
    true_risk = table.mean(axis=1)
    assert true_risk[0] < RISK < true_risk[-1], "a promise that cannot be broken is not tested"
    for _ in range(DRAWS):
        chosen = choose(table[:, rng.integers(0, table.shape[1], units)])
        broken += chosen is not None and true_risk[chosen] > RISK
    return broken


def learn_then_test(losses_SU: NDArray[np.float64], p_value: str = "hoeffding_bentkus") -> int | None:
    judged: Judged = Table(losses_SU)  # type: ignore[assignment]
    tested = fixed_sequence(judged, single_settings(2), RISK, ERROR, P_VALUES[p_value])
    passed = last_passed(tested, ERROR)
    return None if passed is None else GRID.index(passed.thresholds[0])


def test_the_stated_risk_is_exceeded_no_more_often_than_allowed() -> None:
    for p_value in P_VALUES:
        broken = broken_promises(lambda losses, name=p_value: learn_then_test(losses, name), units=300)
        assert broken <= ERROR * DRAWS, f"{p_value}: {broken} of {DRAWS}"


def test_without_tests_the_promise_breaks() -> None:
    """Negative control: the loosest threshold whose mean loss is low enough is too loose half of the time."""

    def believe_the_mean(losses_SU: NDArray[np.float64]) -> int | None:
        good = np.flatnonzero(losses_SU.mean(axis=1) <= RISK)
        return int(good[-1]) if len(good) else None

    assert broken_promises(believe_the_mean, units=300) > 2 * ALLOWED


def test_tokens_taken_as_independent_break_the_promise() -> None:
    """Negative control: tokens of one document err together, so they are no units."""
    broken, rng, table = 0, np.random.default_rng(3), loss_table(0)
    true_risk, tokens = table.mean(axis=1), 20
    for _ in range(DRAWS):
        means = table[:, rng.integers(0, table.shape[1], 40)].mean(axis=1)
        n = 40 * tokens
        chosen = None
        for index, mean in enumerate(means):
            if float(binom.cdf(round(n * mean), n, RISK)) > ERROR:
                break
            chosen = index
        broken += chosen is not None and true_risk[chosen] > RISK
    assert broken > ALLOWED


def test_many_settings_at_once_break_the_promise() -> None:
    """Negative control: any setting that passes, of many whose risks are all too large."""
    rng, n, settings = np.random.default_rng(4), 300, len(GRID)
    losses = rng.random((DRAWS, settings, n)) < RISK * 1.02
    p_values = [[hoeffding_bentkus(unit.astype(float), RISK) for unit in draw] for draw in losses[:60]]
    careless = sum(min(draw) <= ERROR for draw in p_values)
    in_sequence = sum(draw[0] <= ERROR for draw in p_values)
    assert careless > 30
    assert in_sequence <= binom.ppf(0.999, 60, ERROR)


@pytest.mark.parametrize("name", sorted(P_VALUES))
@pytest.mark.parametrize("spread", ["coins", "shares", "constant"])
def test_p_values_are_small_no_more_often_than_they_say(name: str, spread: str) -> None:
    """At the border of the hypothesis: mean loss exactly the risk."""
    rng, draws, n = np.random.default_rng(5), 1000, 250
    if spread == "coins":
        losses = (rng.random((draws, n)) < RISK).astype(float)
    elif spread == "shares":
        losses = rng.beta(0.2, 0.2 * (1 - RISK) / RISK, (draws, n))
    else:
        losses = np.full((draws, n), RISK)
    p_values = np.array([P_VALUES[name](row, RISK) for row in losses])
    for level in (0.01, 0.05, 0.2):
        assert (p_values <= level).sum() <= binom.ppf(0.9999, draws, level)


def test_p_values_find_what_is_there() -> None:
    rng = np.random.default_rng(6)
    clearly_below = (rng.random(2000) < RISK / 3).astype(float)
    assert all(p_value(clearly_below, RISK) < 1e-3 for p_value in P_VALUES.values())
    alike = np.full(400, 0.6 * RISK)
    assert betting(alike, RISK) < 0.2 * hoeffding_bentkus(alike, RISK)


@given(st.integers(1, 400), st.floats(0.005, 0.3), st.integers(0, 2**20))
def test_p_value_against_its_formula(n: int, risk: float, seed: int) -> None:
    losses = np.random.default_rng(seed).random(n) * risk * 1.5
    mean = float(losses.mean())
    found = hoeffding_bentkus(losses, risk)
    if mean >= risk:
        assert found == 1.0
        return
    relative = mean * math.log(mean / risk) + (1 - mean) * math.log((1 - mean) / (1 - risk))
    tail = sum(math.comb(n, k) * risk**k * (1 - risk) ** (n - k) for k in range(math.ceil(n * mean) + 1))
    assert found == pytest.approx(min(1.0, math.exp(-n * relative), math.e * tail), rel=1e-6)


def test_least_units_is_the_least() -> None:
    n = least_units(0.02, 0.05)
    assert n == 149
    assert hoeffding_bentkus(np.zeros(n), 0.02) <= 0.05 < hoeffding_bentkus(np.zeros(n - 1), 0.02)


def test_thresholds_per_exit_keep_the_promise_and_save_depth() -> None:
    """The path comes from one half, the test from the other; a fresh draw each time."""
    everything, depths = population(7, units=3000), (2, 4, 12)
    rng, broken, saved = np.random.default_rng(8), 0, []
    for _ in range(6):
        chosen = rng.permutation(3000)
        half = np.zeros(3000, dtype=bool)
        half[chosen[:400]] = True
        other = np.zeros(3000, dtype=bool)
        other[chosen[400:1200]] = True
        path = exit_path(everything.of_units(half), depths, RISK)
        tested = fixed_sequence(everything.of_units(other), path, RISK, ERROR, hoeffding_bentkus)
        passed = last_passed(tested, ERROR)
        assert passed is not None
        broken += float(everything.losses(passed.thresholds).mean()) > RISK
        single = last_passed(
            fixed_sequence(everything.of_units(other), single_settings(2), RISK, ERROR, hoeffding_bentkus),
            ERROR,
        )
        assert single is not None
        depth = [np.asarray(depths)[everything.leaving(one.thresholds)].mean() for one in (passed, single)]
        saved.append(depth[1] - depth[0])
    assert broken <= 2
    assert np.mean(saved) > 0, "the path is no better than one threshold"


def test_paths_go_from_strict_to_loose() -> None:
    judged = population(9, units=400)
    path = exit_path(judged, (2, 4, 6), RISK)
    assert len(path) == len(set(path)) > 5
    depths = [np.asarray((2, 4, 6))[judged.leaving(one)].mean() for one in path]
    losses = [judged.losses(one).mean() for one in path]
    assert np.mean(np.diff(depths) <= 1e-9) > 0.9
    assert np.mean(np.diff(losses) >= -1e-9) > 0.9


def test_the_path_meets_the_best_settings_of_all() -> None:
    """On the units it was made from, no setting of a grid is better in both loss and depth by much."""
    judged, depths = population(12, units=150), np.asarray((2, 4, 12))
    path = exit_path(judged, depths.tolist(), RISK)
    found = [(judged.losses(one).mean(), depths[judged.leaving(one)].mean()) for one in path]
    for first in GRID[4::8]:
        for second in GRID[4::8]:
            loss = judged.losses((first, second)).mean()
            depth = depths[judged.leaving((first, second))].mean()
            if found[0][0] <= loss <= found[-1][0]:
                assert min(d for one, d in found if one <= loss) <= depth + 0.6


def test_an_exit_that_never_errs_gets_no_higher_a_threshold() -> None:
    judged = population(11, units=800)
    judged.outcomes.predicted_EN[1] = judged.outcomes.predicted_EN[2]
    path = exit_path(judged, (4, 5, 12), RISK)
    assert all(setting[0] >= setting[1] for setting in path)


def test_losses_are_those_of_a_loop() -> None:
    judged = population(10, units=30, tokens=7)
    for thresholds in ((0.3, 0.8), (1.0, 0.5), (1.0, 1.0), (0.0, 1.0)):
        losses: list[list[bool]] = [[] for _ in range(30)]
        for token, unit in enumerate(judged.unit_N):
            exit_index = 2
            for index in (1, 0):
                bar = thresholds[index]
                if bar < 1.0 and judged.outcomes.confidence_EN[index, token] >= bar:
                    exit_index = index
            mine, final = judged.outcomes.predicted_EN[[exit_index, 2], token]
            losses[unit].append(bool(mine != final))
        assert judged.losses(thresholds) == pytest.approx([np.mean(one) for one in losses])


def test_accuracy_loss_counts_what_the_full_model_gets_right() -> None:
    predicted = np.array([[1, 1, 2, 2], [1, 2, 2, 1]])
    outcomes = Outcomes(
        cross_entropy_EN=np.zeros((2, 4)),
        predicted_EN=predicted,
        probability_EN=np.full((2, 4), 0.5),
        confidence_EN=np.full((2, 4), 0.5),
        label_N=np.array([1, 2, 1, 2]),
    )
    judged = Judged(outcomes, np.array([0, 0, 1, 1]), "accuracy_loss")
    assert judged.losses((0.5,)).tolist() == [0.5, 0.0]
    assert judged.losses((1.0,)).tolist() == [0.0, 0.0]
    by_disagreement = Judged(outcomes, np.array([0, 0, 1, 1]), "disagreement")
    assert by_disagreement.losses((0.5,)).tolist() == [0.5, 0.5]
