"""Exit decisions and draws: what users may ask for, and that the draws follow the stated distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import DecodeError
from eeplan.runtime.decode.policy import ExitPolicy, confidence_of, exit_policy, judge
from eeplan.runtime.decode.sampling import Sampling, sampling
from eeplan.runtime.model import ExitSpec

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.5, -1.0, -3.0], dtype=torch.float64)
# Hundredths: equal values are ties, and no two differ by less than a softmax can show.
logits = st.lists(st.integers(-2000, 2000).map(lambda n: n / 100), min_size=1, max_size=12)


def draws(options: Sampling, count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    picked = torch.tensor([options.pick(LOGITS, generator) for _ in range(count)])
    return torch.bincount(picked, minlength=len(LOGITS)) / count


@given(logits)
def test_confidence_is_the_largest_softmax_probability(values: list[float]) -> None:
    tensor = torch.tensor(values)
    assert confidence_of(tensor) == pytest.approx(float(tensor.double().softmax(-1).max()), rel=1e-6)
    assert confidence_of(tensor) <= 1.0


def test_confidence_of_bfloat16_logits_is_computed_in_float32() -> None:
    assert confidence_of(torch.zeros(1000, dtype=torch.bfloat16)) == pytest.approx(1e-3, rel=1e-5)


EXITS = (ExitSpec(2, "norm", True), ExitSpec(4, "mlp", True), ExitSpec(6, "norm", True))


def test_exits_in_use_and_their_thresholds() -> None:
    def used(policy: ExitPolicy) -> list[tuple[int, float]]:
        return [(exit_.depth, threshold) for exit_, threshold in policy.for_exits(EXITS)]

    assert used(exit_policy(0.3)) == [(2, 0.3), (4, 0.3), (6, 0.3)]
    assert used(exit_policy([0.3, 0.0], exits=[6, 2])) == [(2, 0.3), (6, 0.0)]
    # Never to leave is never to check: a probability that rounds to 1.0 must not leave at threshold 1.
    assert used(exit_policy(1.0)) == []
    assert used(exit_policy([0.5, 1.0, 0.7])) == [(2, 0.5), (6, 0.7)]


@given(logits)
def test_other_measures_of_confidence(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    shares = tensor.softmax(-1)
    assert judge(tensor).log_normalizer == pytest.approx(float(tensor.logsumexp(-1)))
    if len(values) == 1:
        assert confidence_of(tensor, "margin") == confidence_of(tensor, "entropy") == 1.0
        return
    first, second = shares.topk(2).values
    assert confidence_of(tensor, "margin") == pytest.approx(float(first - second), abs=1e-12)
    entropy = float(torch.special.entr(shares).sum()) / math.log(len(values))
    assert confidence_of(tensor, "entropy") == pytest.approx(1 - entropy, abs=1e-9)


def test_entropy_of_ruled_out_tokens() -> None:
    tensor = torch.tensor([0.0, 0.0, float("-inf"), float("-inf")])
    assert confidence_of(tensor, "entropy") == pytest.approx(0.5)


def test_repetition_penalty_as_in_ctrl() -> None:
    options = Sampling(1.0, repetition_penalty=2.0)
    expected = LOGITS.clone()
    expected[0], expected[4] = 1.0, -2.0
    torch.testing.assert_close(options.probabilities(LOGITS, [0, 4, 0]), expected.softmax(-1))
    torch.testing.assert_close(options.probabilities(LOGITS), LOGITS.softmax(-1))
    assert Sampling(repetition_penalty=4.0).pick(LOGITS, torch.Generator(), [0]) == 1
    assert Sampling(repetition_penalty=4.0).probabilities(LOGITS, [0]).tolist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("threshold", [-0.1, 1.1, 80, math.nan, math.inf])
def test_threshold_out_of_range(threshold: float) -> None:
    with pytest.raises(DecodeError, match=r"threshold is .*from 0 .* to 1"):
        exit_policy(threshold)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": 1.0, "top_k": -1}, "top_k is -1"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 5}, "no effect at temperature 0"),
        ({"top_p": 0.9}, "no effect at temperature 0"),
    ],
)
def test_sampling_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        sampling(**({"temperature": 0.0, "top_k": 0, "top_p": 0.0} | options))


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    found = draws(Sampling(temperature=2.0), 20_000)
    expected = (LOGITS / 2.0).softmax(-1)
    # Five standard deviations of a frequency at 20,000 draws.
    assert bool(((found - expected).abs() < 5 * (expected * (1 - expected) / 20_000).sqrt()).all())
    wrong = LOGITS.softmax(-1)
    assert bool(((found - wrong).abs() > 5 * (wrong * (1 - wrong) / 20_000).sqrt()).any())


def test_top_k_keeps_exactly_k_also_with_ties() -> None:
    assert int((Sampling(1.0, top_k=3).probabilities(LOGITS) > 0).sum()) == 3


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    full = LOGITS.softmax(-1)
    kept = Sampling(1.0, top_p=float(full[0]) + 1e-6).probabilities(LOGITS)
    assert (kept > 0).tolist() == [True, True, False, False, False, False]
    assert kept[0] / kept[1] == pytest.approx(float(full[0] / full[1]))
    only = Sampling(1.0, top_p=float(full[0]) - 1e-6).probabilities(LOGITS)
    assert (only > 0).tolist() == [True, False, False, False, False, False]


@settings(max_examples=50)
@given(logits, st.floats(0.1, 5.0), st.integers(0, 15), st.floats(0.0, 1.0))
def test_probabilities_sum_to_one_and_keep_the_most_likely(
    values: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    found = Sampling(temperature, top_k, top_p).probabilities(tensor)
    assert float(found.sum()) == pytest.approx(1.0)
    assert float(found.max()) == float(found[tensor == tensor.max()].max())
    assert int((found > 0).sum()) <= (top_k or len(values))


def test_one_candidate_is_greedy() -> None:
    assert draws(Sampling(1.0, top_k=1), 20)[0] == 1.0
    assert draws(Sampling(), 20)[0] == 1.0
