from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import SchemaError
from eeplan.schema import dump_yaml, parse_yaml, validate, write_yaml
from eeplan.usage import ExitUsage, MeasuredUsage, UsagePrior, exit_shares, leave_curve, load_usage

MEASURED: dict[str, Any] = {
    "source": "checkpoint of iteration 200 on the validation part",
    "num_layers": 12,
    "depths": [3, 6],
    "num_tokens": 4096,
    "curve": [
        {"threshold": 0.5, "could_leave": [0.4, 0.5], "first_leave": [0.4, 0.2]},
        {"threshold": 0.9, "could_leave": [0.1, 0.3], "first_leave": [0.1, 0.25]},
    ],
}


def measured(**changes: Any) -> MeasuredUsage:
    return validate({**MEASURED, **changes}, MeasuredUsage, "usage")


@st.composite
def measurements(draw: st.DrawFn) -> MeasuredUsage:
    layers = draw(st.integers(2, 20))
    depths = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=1, max_size=4)))
    thresholds = sorted(draw(st.sets(st.integers(0, 20), min_size=1, max_size=5)))
    could = [sorted(draw(st.floats(0, 1)) for _ in thresholds)[::-1] for _ in depths]
    curve = []
    for index, threshold in enumerate(thresholds):
        here = [column[index] for column in could]
        first, left = [], 0.0
        for share in here:
            first.append(draw(st.floats(0, 1)) * min(share, 1.0 - left))
            left += first[-1]
        curve.append({"threshold": threshold / 20, "could_leave": here, "first_leave": first})
    return validate(
        {
            "source": "drawn",
            "num_layers": layers,
            "depths": depths,
            "num_tokens": 10,
            "curve": curve,
        },
        MeasuredUsage,
        "usage",
    )


priors = st.one_of(
    st.sampled_from([UsagePrior(), UsagePrior(name="none")]),
    st.builds(
        UsagePrior,
        name=st.just("ramp"),
        start=st.floats(0, 0.9),
        share=st.floats(0, 1),
        exponent=st.floats(0.2, 5),
    ),
)


@settings(max_examples=80, deadline=None)
@given(st.one_of(measurements(), priors), st.floats(0, 1), st.data())
def test_shares_are_a_distribution(usage: Any, threshold: float, data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 20))
    if isinstance(usage, MeasuredUsage) and data.draw(st.booleans()):
        layers, depths = usage.num_layers, list(usage.depths)
    else:
        depths = sorted(data.draw(st.sets(st.integers(1, 20), max_size=5)) & set(range(1, layers)))
    shares = exit_shares(usage, threshold, depths, layers)
    assert len(shares.early) == len(depths)
    assert all(0 <= share <= 1 for share in shares.all)
    assert sum(shares.all) == pytest.approx(1.0)
    assert min([*depths, layers]) <= shares.mean_depth * (1 + 1e-9) <= layers * (1 + 2e-9)
    assert shares.sentence


@settings(max_examples=60, deadline=None)
@given(st.one_of(measurements(), priors), st.floats(0, 1), st.floats(0, 1), st.integers(1, 20))
def test_the_curve_rises_with_depth_and_falls_with_the_threshold(
    usage: Any, one: float, other: float, layers: int
) -> None:
    low, high = (leave_curve(usage, threshold, layers) for threshold in sorted((one, other)))
    for curve in (low, high):
        assert len(curve) == layers
        assert curve[0] == 0.0
        assert all(a <= b + 1e-12 for a, b in pairwise(curve))
    assert all(a >= b - 1e-12 for a, b in zip(low, high, strict=True))


def test_measured_shares_are_taken_as_counted() -> None:
    shares = exit_shares(measured(), 0.9, [3, 6], 12)
    assert shares.early == (0.1, 0.25)
    assert shares.final == pytest.approx(0.65)
    assert shares.mean_depth == pytest.approx(0.3 + 1.5 + 7.8)
    assert not shares.is_assumption
    assert shares.sentence == "measured on 4096 tokens: checkpoint of iteration 200 on the validation part"


def test_between_two_thresholds_shares_are_interpolated_and_marked() -> None:
    shares = exit_shares(measured(), 0.7, [3, 6], 12)
    assert shares.early == pytest.approx((0.25, 0.225))
    assert shares.is_assumption
    assert shares.sentence.endswith("partly assumed: threshold 0.7 interpolated")
    # Beyond the last one towards threshold 1, where nobody leaves.
    assert exit_shares(measured(), 0.95, [3, 6], 12).early == pytest.approx((0.05, 0.125))


def test_other_exits_read_the_curve_and_are_marked() -> None:
    shares = exit_shares(measured(), 0.9, [2, 9], 12)
    assert shares.early == pytest.approx((0.1 * 2 / 3, 0.3 - 0.1 * 2 / 3))
    assert shares.is_assumption
    assert "other exits than those measured" in shares.sentence
    deeper = exit_shares(measured(), 0.9, [6, 12], 24)
    assert deeper.early == pytest.approx((0.1, 0.2))
    assert "equal fractions of 12 layers" in deeper.sentence


@pytest.mark.parametrize("usage", [measured(), UsagePrior(), UsagePrior(name="ramp", share=0.3)])
def test_the_policy_is_certain_at_both_ends(usage: Any) -> None:
    for depths in ([3, 6], [2, 7, 8]):
        never = exit_shares(usage, 1.0, depths, 12)
        assert never.early == (0.0,) * len(depths)
        always = exit_shares(usage, 0.0, depths, 12)
        assert always.early == (1.0, *[0.0] * (len(depths) - 1))
        assert not never.is_assumption
        assert not always.is_assumption


def test_priors_say_what_they_suppose() -> None:
    uniform = exit_shares(UsagePrior(), 0.8, [3, 6], 12)
    assert uniform.early == (0.25, 0.25)
    assert uniform.is_assumption
    assert uniform.sentence == (
        "assumed, not measured: the depth that a token needs is uniform over the layers"
    )
    ramp = UsagePrior(name="ramp", start=0.25, share=0.6, exponent=2.0)
    assert exit_shares(ramp, 0.8, [3, 6], 12).early == pytest.approx((0.0, 0.6 / 9))
    assert "before 25% of the depth" in ramp.sentence()
    assert "60%" in ramp.sentence()
    none = exit_shares(UsagePrior(name="none"), 0.8, [3], 12)
    assert none.early == (0.0,)
    assert none.is_assumption


def test_no_exits_need_no_assumption() -> None:
    shares = exit_shares(UsagePrior(), 0.8, [], 12)
    assert (shares.all, shares.mean_depth, shares.is_assumption) == ((1.0,), 12.0, False)


@settings(max_examples=20, deadline=None)
@given(measurements())
def test_a_usage_survives_its_yaml(usage: MeasuredUsage) -> None:
    whole = ExitUsage(schema_version=1, measured=usage)
    assert validate(parse_yaml(dump_yaml(whole).encode(), "usage"), ExitUsage, "usage") == whole


def test_files_hold_a_measurement_or_a_prior(tmp_path: Path) -> None:
    write_yaml(tmp_path / "usage.yaml", ExitUsage(schema_version=1, measured=measured()))
    assert load_usage(tmp_path / "usage.yaml")[0].content == measured()
    (tmp_path / "prior.yaml").write_text("schema_version: 1\nprior: {name: ramp, share: 0.5}\n")
    assert load_usage(tmp_path / "prior.yaml")[0].content == UsagePrior(name="ramp", share=0.5)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "give either measured or prior"),
        ({"prior": {}, "measured": MEASURED}, "give either measured or prior"),
        ({"prior": {"name": "uniform"}}, "input should be 'uniform_depth', 'ramp' or 'none'"),
        ({"prior": {"name": "none", "share": 0.5}}, "prior 'none' has no parameters; take name: ramp"),
        ({"prior": {"name": "ramp", "start": 1.0}}, "less than 1"),
        ({"measured": {**MEASURED, "depths": []}}, "at least 1 item"),
        ({"measured": {**MEASURED, "depths": [6, 3]}}, "expected ascending, each once"),
        ({"measured": {**MEASURED, "depths": [3, 12]}}, "depths end with 12, but the model has 12 layers"),
        ({"measured": {**MEASURED, "depths": [3]}}, "curve[0]: could_leave has 2 entries for 1 depths"),
        ({"measured": {**MEASURED, "curve": []}}, "at least 1 item"),
        ({"measured": {**MEASURED, "curve": MEASURED["curve"][::-1]}}, "threshold 0.5 does not ascend"),
        (
            {
                "measured": {
                    **MEASURED,
                    "curve": [
                        MEASURED["curve"][0],
                        {"threshold": 0.6, "could_leave": [0.5, 0.5], "first_leave": [0.1, 0.1]},
                    ],
                }
            },
            "curve[1]: more tokens could leave at threshold 0.6 than at the lower 0.5",
        ),
        (
            {
                "measured": {
                    **MEASURED,
                    "curve": [{"threshold": 0.5, "could_leave": [0.9, 0.9], "first_leave": [0.9, 0.2]}],
                }
            },
            "first_leave adds up to 1.1",
        ),
        (
            {
                "measured": {
                    **MEASURED,
                    "curve": [{"threshold": 0.5, "could_leave": [0.1, 0.9], "first_leave": [0.2, 0.2]}],
                }
            },
            "at depth 3 more tokens leave first (0.2) than could leave (0.1)",
        ),
    ],
)
def test_broken_usages_are_refused(tmp_path: Path, document: dict[str, Any], message: str) -> None:
    path = tmp_path / "usage.yaml"
    path.write_text(yaml.safe_dump({"schema_version": 1, **document}))
    with pytest.raises(SchemaError) as caught:
        load_usage(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
