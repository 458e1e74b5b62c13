from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import make_profile, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import ProfileError, SchemaError
from eeplan.profile import ModelShape, OpProfile, Transfer, Way, load_profile
from eeplan.schema import dump_yaml, parse_yaml, validate, write_yaml


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.floats(0, 0.9), st.sampled_from(["fp32", "bf16"]))
def test_a_profile_survives_its_yaml(seed: int, jitter: float, precision: str) -> None:
    profile = make_profile(make_run(training__precision=precision), seed=seed, jitter=jitter)
    text = dump_yaml(profile).encode()
    assert validate(parse_yaml(text, "profile"), OpProfile, "profile") == profile


def test_a_profile_file_is_read_with_its_hash(tmp_path: Path) -> None:
    profile = make_profile(make_run())
    write_yaml(tmp_path / "profile.yaml", profile)
    loaded, digest = load_profile(tmp_path / "profile.yaml")
    assert loaded == profile
    assert len(digest) == 64


def broken(change: dict[str, Any]) -> str:
    document = {**make_profile(make_run()).model_dump(mode="json"), **change}
    with pytest.raises(SchemaError) as caught:
        validate(document, OpProfile, "profile p.yaml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_op_given_twice_is_refused() -> None:
    ops = make_profile(make_run()).model_dump(mode="json")["ops"]
    message = broken({"ops": [*ops, ops[1]]})
    assert (
        "'layer' at micro_batch_size 2 and tensor_model_parallel_size 1 is given twice; keep one" in message
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"thread": 1}, "unknown key 'thread'; did you mean 'threads'?"),
        ({"threads": 0}, "key 'threads' has value 0: input should be greater than 0"),
        ({"microbatch_overhead_s": -1.0}, "greater than or equal to 0"),
        ({"p2p": {"latency_s": 0.0, "bandwidth_bytes_per_s": 0.0}}, "greater than 0"),
        ({"device": {"kind": "tpu"}}, "input should be 'cpu' or 'cuda'"),
        ({"ops": [{"op": "convolution"}]}, "input should be 'embedding', 'layer'"),
    ],
)
def test_broken_profiles_are_refused(change: dict[str, Any], message: str) -> None:
    assert message in broken(change)


def test_costs_are_looked_up_by_op_and_size() -> None:
    profile = make_profile(make_run())
    assert profile.cost("layer", 2).op == "layer"
    with pytest.raises(ProfileError, match=r"no 'layer' at micro_batch_size 4 .*micro_batch_size \[2\]"):
        profile.cost("layer", 4)
    with pytest.raises(ProfileError, match=r"parallel_size 8 \(it was not measured\); run `eeplan profile"):
        profile.cost("layer", 2, Way(8))


def test_costs_between_two_sizes_lie_on_their_line_and_are_marked() -> None:
    small, large = (make_profile(make_run(training__micro_batch_size=size), jitter=0.5) for size in (2, 8))
    profile = small.model_copy(update={"ops": (*large.ops, *small.ops)})
    for op in ("layer", "exit_mlp"):
        one, other = small.cost(op, 2), large.cost(op, 8)  # type: ignore[arg-type]
        found = profile.cost(op, 4)  # type: ignore[arg-type]
        assert found.interpolated
        assert not one.interpolated
        assert not found.extrapolated
        for side in ("forward", "backward"):
            for name in ("median_s", "mean_s", "p10_s", "p90_s"):
                at_two, at_four, at_eight = (getattr(getattr(c, side), name) for c in (one, found, other))
                assert at_four == pytest.approx((2 * at_two + at_eight) / 3)
        assert found.kept_bytes == round((2 * one.kept_bytes + other.kept_bytes) / 3)
        assert found.backward_transient_bytes == round(
            (2 * one.backward_transient_bytes + other.backward_transient_bytes) / 3
        )
    for outside, wanted in ((1, "1,2,8"), (9, "2,8,9")):
        with pytest.raises(ProfileError, match=f"run `eeplan profile --micro-batch-sizes {wanted}`"):
            profile.cost("layer", outside)
    # A neighbour that was no measurement makes none of what lies between.
    derived = tuple(op.model_copy(update={"extrapolated": True}) for op in large.ops)
    assert profile.model_copy(update={"ops": (*small.ops, *derived)}).cost("layer", 4).extrapolated


def test_ops_run_in_other_ways_are_told_apart() -> None:
    profile = make_profile(make_run())
    ways = (Way(), Way(2), Way(2, True), Way(1, False, "full"))
    layers = tuple(
        profile.cost("layer", 2).model_copy(update=way._asdict() | {"kept_bytes": index})
        for index, way in enumerate(ways)
    )
    several = profile.model_validate(profile.model_dump() | {"ops": layers})
    assert [several.cost("layer", 2, way).kept_bytes for way in ways] == [0, 1, 2, 3]
    with pytest.raises(ProfileError, match="tensor_model_parallel_size 2, recompute_granularity full"):
        several.cost("layer", 2, Way(2, False, "full"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model__hidden_size": 128}, "hidden_size 128, the run file has 64"),
        ({"model__num_attention_heads": 8}, "num_attention_heads 8, the run file has 4"),
        ({"model__num_query_groups": 2}, "num_query_groups 2, the run file has 4"),
        ({"model__ffn_hidden_size": 256}, "ffn_hidden_size 256"),
        ({"model__vocab_size": 300}, "padded_vocab_size 384, the run file has 256"),
        ({"training__seq_length": 64}, "seq_length 64, the run file has 32"),
        ({"training__precision": "bf16"}, "precision bf16, the run file has fp32"),
    ],
)
def test_a_profile_of_another_shape_is_refused(change: dict[str, Any], message: str) -> None:
    profile = make_profile(make_run(**change))
    with pytest.raises(ProfileError, match=message):
        profile.require_shape_of(make_run())
    profile.require_shape_of(make_run(**change))


def test_depth_and_layout_do_not_change_the_shape() -> None:
    other = make_run(model__num_layers=4, parallel__pipeline_model_parallel_size=4, model__vocab_size=200)
    assert ModelShape.of(other) == ModelShape.of(make_run())


def test_a_transfer_is_a_line() -> None:
    assert Transfer(latency_s=1.0, bandwidth_bytes_per_s=4.0).seconds(8) == 3.0
