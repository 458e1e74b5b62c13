from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import SpecError
from eeplan.sim.loss_weights import explain_weights, target_weights, weight_at
from eeplan.spec import LossWeightSpec, WeightSchedule
from eeplan.usage import UsagePrior, exit_shares


def test_depth_policy_gives_the_papers_quarter_and_half() -> None:
    assert target_weights(LossWeightSpec(), (6, 12), 24) == (0.25, 0.5)


def test_uniform_policy_repeats_the_scale() -> None:
    assert target_weights(LossWeightSpec(policy="uniform", scale=0.1), (3, 5, 9), 12) == (0.1, 0.1, 0.1)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=8, unique=True),
    st.floats(0.01, 10),
    st.sampled_from(["depth", "uniform", "normalized"]),
)
def test_policies_scale_linearly_and_never_favour_the_shallow(
    depths: list[int], scale: float, policy: str
) -> None:
    depths = sorted(depths)
    weights = target_weights(LossWeightSpec(policy=policy, scale=scale), depths, 100)
    unit = target_weights(LossWeightSpec(policy=policy), depths, 100)
    assert weights == pytest.approx([scale * weight for weight in unit])
    assert sorted(weights) == list(weights)
    if policy == "normalized":
        assert sum(weights) == pytest.approx(scale)


def test_a_weight_by_hand_replaces_only_its_own() -> None:
    spec = LossWeightSpec(policy="normalized")
    assert target_weights(spec, (2, 6), 8, (None, 0.0)) == (0.25, 0.0)


def test_no_exits_have_no_weights() -> None:
    assert target_weights(LossWeightSpec(policy="normalized"), (), 8) == ()


def test_a_missing_entry_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        target_weights(LossWeightSpec(), (2, 6), 8, (0.5,))


def test_usage_policy_follows_the_tokens() -> None:
    usage = exit_shares(UsagePrior(), 0.8, [2, 3, 7], 8)
    spec = LossWeightSpec(policy="usage", scale=0.7)
    assert target_weights(spec, [2, 3, 7], 8, usage=usage) == pytest.approx((0.2, 0.1, 0.4))
    assert target_weights(spec, [2, 3, 7], 8, [None, 1.0, None], usage) == pytest.approx((0.2, 1.0, 0.4))
    sentence = explain_weights(spec, 0, usage)
    assert "together 0.7 (assumed, not measured" in sentence
    assert target_weights(spec, [], 8, usage=exit_shares(UsagePrior(), 0.8, [], 8)) == ()


def test_usage_policy_needs_tokens_that_leave() -> None:
    spec = LossWeightSpec(policy="usage")
    for usage in (
        exit_shares(UsagePrior(), 1.0, [2], 8),
        exit_shares(UsagePrior(name="none"), 0.5, [2], 8),
    ):
        with pytest.raises(SpecError, match=r"finds no token that leaves early .*lower decode\.threshold"):
            target_weights(spec, [2], 8, usage=usage)
    with pytest.raises(AssertionError, match=r"not at \(3,\)"):
        target_weights(spec, [3], 8, usage=exit_shares(UsagePrior(), 0.5, [2], 8))


def test_schedules_are_the_papers() -> None:
    """EE-LLM C.1, by hand: 4 iterations from a quarter of the weight 0.8 to all of it, or from twice it."""
    linear = WeightSchedule(style="linear", init=0.25, iters=4)
    assert [weight_at(0.8, linear, i) for i in range(1, 7)] == pytest.approx([0.2, 0.35, 0.5, 0.65, 0.8, 0.8])
    cosine = WeightSchedule(style="cosine", init=2.0, iters=2)
    assert [weight_at(0.8, cosine, i) for i in range(1, 5)] == pytest.approx([1.6, 1.2, 0.8, 0.8])
    assert weight_at(0.8, None, 1) == 0.8


@settings(deadline=None)
@given(
    st.sampled_from(["linear", "cosine"]),
    st.floats(0, 5),
    st.integers(1, 50),
    st.floats(0, 3),
)
def test_schedules_are_monotone_between_their_ends(
    style: str, init: float, iters: int, target: float
) -> None:
    schedule = WeightSchedule(style=style, init=init, iters=iters)
    weights = [weight_at(target, schedule, iteration) for iteration in range(1, iters + 4)]
    assert weights[0] == pytest.approx(init * target)
    assert weights[iters:] == pytest.approx([target] * 3)
    signs = {a < b for a, b in pairwise(weights) if abs(a - b) > 1e-9}
    assert len(signs) <= 1


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (WeightSchedule(init=0.0, iters=50), "all warm up linearly from 0 times their targets over 50"),
        (
            WeightSchedule(style="cosine", init=3.0, iters=9),
            "all cool down along a cosine from 3 times their targets over 9 iterations",
        ),
    ],
)
def test_the_schedule_is_explained(schedule: WeightSchedule, words: str) -> None:
    assert words in explain_weights(LossWeightSpec(warmup=schedule), 0)
    assert "times their targets" not in explain_weights(LossWeightSpec(), 0)


@pytest.mark.parametrize("policy", ["depth", "uniform", "normalized"])
def test_the_explanation_names_policy_scale_and_exceptions(policy: str) -> None:
    spec = LossWeightSpec(policy=policy, scale=0.3)
    assert f"'{policy}'" in explain_weights(spec, 0)
    assert "0.3" in explain_weights(spec, 0)
    assert "1 set by hand" in explain_weights(spec, 1)
