from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.sim.loss_weights import explain_weights, target_weights
from eeplan.spec import LossWeightSpec


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


@pytest.mark.parametrize("policy", ["depth", "uniform", "normalized"])
def test_the_explanation_names_policy_scale_and_exceptions(policy: str) -> None:
    spec = LossWeightSpec(policy=policy, scale=0.3)
    assert f"'{policy}'" in explain_weights(spec, 0)
    assert "0.3" in explain_weights(spec, 0)
    assert "1 set by hand" in explain_weights(spec, 1)
