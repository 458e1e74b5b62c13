"""Thresholds whose risk is bounded with a stated confidence: Learn-then-Test (Angelopoulos et al. 2021).

Every unit of a calibration text (a document, say) has a loss from 0 to 1 at every setting of the thresholds.
For the settings of one sequence, strictest first, a p-value tests "the expected loss of a new unit is above
the risk"; the last setting before the first that cannot be refused is taken. Testing in a fixed sequence
needs no correction for the number of settings, as long as neither their order nor the list comes from the
losses they are tested on (ibid., 4): so a single threshold runs down a grid given here, and the path of
thresholds per exit is found on one half of the units and tested on the other (Pareto testing,
Laufer-Goldshlager et al. 2023).

All that is assumed of the units is that they, and the new ones, are drawn independently from one source.
Pure numbers: nothing here runs a model.

Shape suffixes: E early exits by depth; N tokens; U units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from eeplan.runtime.decode.quality import Outcomes

Metric = Literal["disagreement", "accuracy_loss"]
"""Share of a unit's tokens that are not the full model's; or that it gets right and the exit gets wrong,
which is at least the accuracy lost."""
METRICS: tuple[Metric, ...] = get_args(Metric)

GRID = (0.9999, 0.999, 0.998, 0.995, *(round(0.99 - 0.01 * step, 2) for step in range(100)))
"""Thresholds below 1 to test, strictest first."""
PRICES, TURNS, STEPS = 40, 2, 10
"""Of a path of thresholds per exit: prices, looks at each threshold for one, steps from one to the next."""
PATH_RISKS = 2.0
"""A path of settings is not followed further once its own half's risk is so many times the allowed one."""

Thresholds = tuple[float, ...]
"""One for each early exit, by depth."""
PValue = Callable[[NDArray[np.float64], float], float]
"""From the units' losses and the risk to a p-value for "the expected loss is above the risk"."""


@dataclass(frozen=True, slots=True)
class Tested:
    """One setting and what its test said."""

    thresholds: Thresholds
    mean_loss: float
    p_value: float


@dataclass(frozen=True, slots=True)
class Judged:
    """Outcomes of a calibration text, and the unit of every token."""

    outcomes: Outcomes
    unit_N: NDArray[np.int64]
    """0 to U - 1; every unit has a token."""
    metric: Metric

    @property
    def num_units(self) -> int:
        """U."""
        return int(self.unit_N.max()) + 1 if len(self.unit_N) else 0

    @property
    def num_exits(self) -> int:
        """Early exits."""
        return len(self.outcomes.confidence_EN) - 1

    def leaving(self, thresholds: Thresholds) -> NDArray[np.int64]:
        """[N] index of the exit where each token leaves; the last index is the final exit."""
        # As in decoding: a threshold of 1 is never reached, not even by a probability that rounds to it.
        bars_E1 = np.array([math.inf if one >= 1.0 else one for one in thresholds])[:, None]
        reached_EN = self.outcomes.confidence_EN[:-1] >= bars_E1
        last_1N = np.ones((1, self.outcomes.num_tokens), dtype=np.bool_)
        return np.concatenate((reached_EN, last_1N)).argmax(axis=0)

    def losses(self, thresholds: Thresholds) -> NDArray[np.float64]:
        """[U] loss of every unit."""
        bad_N = self.bad()[self.leaving(thresholds), np.arange(self.outcomes.num_tokens)]
        return np.bincount(self.unit_N, bad_N, self.num_units) / np.bincount(self.unit_N)

    def of_units(self, chosen_U: NDArray[np.bool_]) -> Judged:
        """The same of some units, numbered anew."""
        keep_N = chosen_U[self.unit_N]
        one = self.outcomes
        outcomes = Outcomes(
            cross_entropy_EN=one.cross_entropy_EN[:, keep_N],
            predicted_EN=one.predicted_EN[:, keep_N],
            probability_EN=one.probability_EN[:, keep_N],
            confidence_EN=one.confidence_EN[:, keep_N],
            label_N=one.label_N[keep_N],
        )
        return Judged(outcomes, (np.cumsum(chosen_U) - 1)[self.unit_N[keep_N]], self.metric)

    def bad(self) -> NDArray[np.bool_]:
        """[E + 1, N] whether an exit's token counts as a loss."""
        predicted = self.outcomes.predicted_EN
        if self.metric == "disagreement":
            return predicted != predicted[-1]
        right = predicted == self.outcomes.label_N
        return right[-1] & ~right


def hoeffding_bentkus(losses_U: NDArray[np.float64], risk: float) -> float:
    """p-value for "the mean of the losses' distribution is above ``risk``" (Bates et al. 2021, 3.1).

    Valid for independent losses from 0 to 1 of any distribution and any number of them: the smaller of
    Hoeffding's exp(-n KL(mean, risk)) and Bentkus' e P(Binomial(n, risk) <= ceil(n mean)).
    """
    n, mean = len(losses_U), float(np.mean(losses_U)) if len(losses_U) else 1.0
    if mean >= risk:
        return 1.0
    hoeffding = math.exp(-n * _divergence(mean, risk))
    # Sums of shares that are whole numbers must not be rounded up to the next one.
    at_most = math.ceil(n * mean - 1e-9)
    return min(1.0, hoeffding, math.e * float(binom.cdf(at_most, n, risk)))


def betting(losses_U: NDArray[np.float64], risk: float) -> float:
    """Another p-value for the same, far smaller where units hardly differ (Waudby-Smith and Ramdas 2023).

    Capital is bet on every loss to lie below ``risk``, with a stake that depends on earlier losses only. If
    the mean were above, capital would not be expected to grow, so 1 / the largest is a p-value (Ville). The
    order of the units must not depend on their losses.
    """
    before = (np.arange(len(losses_U)) + 1.0).astype(np.float64)
    mean_U = (0.5 + np.cumsum(losses_U)) / (before + 1)
    variance_U = (0.25 + np.cumsum((losses_U - mean_U) ** 2)) / (before + 1)
    known_U = np.concatenate(([0.25], variance_U[:-1]))
    stake_U = np.minimum(1.0, np.sqrt(2.0 * math.log(20.0) / (len(losses_U) * known_U)))
    growth_U = np.cumsum(np.log1p(-stake_U * (losses_U - risk)))
    return math.exp(-max(0.0, float(growth_U.max(initial=0.0))))


P_VALUES: dict[str, PValue] = {"hoeffding_bentkus": hoeffding_bentkus, "betting": betting}


def least_units(risk: float, error: float) -> int:
    """Units without any loss that it takes to refuse "above ``risk``" at level ``error``."""
    return math.ceil(math.log(error) / math.log1p(-risk))


def single_settings(num_exits: int) -> list[Thresholds]:
    """The same threshold at every exit, down the grid."""
    return [(threshold,) * num_exits for threshold in GRID]


def exit_path(judged: Judged, depths: Sequence[int], risk: float) -> list[Thresholds]:
    """Thresholds per exit, strictest first: for each price of a layer, those of the grid that make the mean
    loss and the priced mean depth smallest together, found by turns, one exit after the other.

    Args:
        judged: units that the path is not tested on.
        depths: layers that each exit reads, the final one last.
    """
    turns = _Turns(judged, np.asarray(depths, dtype=np.float64))
    path: list[Thresholds] = []
    thresholds: Thresholds = (1.0,) * judged.num_exits
    for price in np.geomspace(1e-4, 1.0, PRICES) / depths[-1]:
        for _ in range(TURNS):
            for exit_index in reversed(range(judged.num_exits)):
                best = turns.best(thresholds, exit_index, float(price))
                thresholds = (*thresholds[:exit_index], best, *thresholds[exit_index + 1 :])
        # The best for two prices in a row may lie far apart; what lies between is tested as well.
        for setting in _between(path[-1] if path else (1.0,) * judged.num_exits, thresholds):
            if float(judged.losses(setting).mean()) > PATH_RISKS * risk:
                return path
            path.append(setting)
    return path


def _between(strict: Thresholds, loose: Thresholds) -> list[Thresholds]:
    """Settings from one to the other, the first left out, in at most ``STEPS`` steps on the grid."""
    grid = (1.0, *GRID)
    starts, ends = [grid.index(one) for one in strict], [grid.index(one) for one in loose]
    steps = min(STEPS, max(abs(end - start) for start, end in zip(starts, ends, strict=True)))
    return [
        tuple(
            grid[start + round((end - start) * step / steps)] for start, end in zip(starts, ends, strict=True)
        )
        for step in range(1, steps + 1)
    ]


class _Turns:
    """Finds the best threshold of one exit while those of the others stay."""

    def __init__(self, judged: Judged, depth_E: NDArray[np.float64]) -> None:
        self._judged, self._depth_E, self._bad_EN = judged, depth_E, judged.bad().astype(np.float64)
        self._token_N = np.arange(judged.outcomes.num_tokens)
        # Every unit counts as much as any other.
        self._weight_N = (1.0 / np.bincount(judged.unit_N))[judged.unit_N] / judged.num_units
        early_EN = judged.outcomes.confidence_EN[:-1]
        self._falling_EN = np.argsort(-early_EN, axis=1, kind="stable")
        rising_EN = np.sort(early_EN, axis=1)
        self._confident_EG = np.stack([len(row) - np.searchsorted(row, GRID) for row in rising_EN])

    def best(self, thresholds: Thresholds, exit_index: int, price: float) -> float:
        """1, or the threshold of the grid that lowers loss + price x depth most; the stricter of equals."""
        without = (*thresholds[:exit_index], 1.0, *thresholds[exit_index + 1 :])
        else_N = self._judged.leaving(without)
        loss_N = self._bad_EN[exit_index] - self._bad_EN[else_N, self._token_N]
        depth_N = self._depth_E[exit_index] - self._depth_E[else_N]
        change_N = np.where(else_N > exit_index, self._weight_N * (loss_N + price * depth_N), 0.0)
        sums = np.concatenate(([0.0], np.cumsum(change_N[self._falling_EN[exit_index]])))
        changes = np.concatenate(([0.0], sums[self._confident_EG[exit_index]]))
        return (1.0, *GRID)[int(np.argmin(changes))]


def fixed_sequence(
    judged: Judged, settings: Iterable[Thresholds], risk: float, error: float, p_value: PValue
) -> list[Tested]:
    """Test settings in their order up to the first that is not refused, which is the last of the result.

    The probability that any of those before it has an expected loss above ``risk`` is at most ``error``.
    """
    tested: list[Tested] = []
    for thresholds in settings:
        losses_U = judged.losses(thresholds)
        tested.append(Tested(thresholds, float(losses_U.mean()), p_value(losses_U, risk)))
        if tested[-1].p_value > error:
            break
    return tested


def last_passed(tested: Sequence[Tested], error: float) -> Tested | None:
    """The loosest setting that passed; None if not even the strictest did."""
    passed = [one for one in tested if one.p_value <= error]
    return passed[-1] if passed else None


def _divergence(mean: float, risk: float) -> float:
    """Kullback-Leibler divergence of coins that fall with ``mean`` and ``risk``."""
    first = mean * math.log(mean / risk) if mean > 0.0 else 0.0
    return first + (1.0 - mean) * math.log((1.0 - mean) / (1.0 - risk))
