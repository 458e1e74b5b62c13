"""Op tables of others: three forms, what is taken over, what is derived and marked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import EeplanError, ProfileError
from eeplan.optable_profile import Cluster, profile_from_table
from eeplan.optables import OpTable, read_op_table
from eeplan.profile import OpProfile, Transfer
from eeplan.schema import dump_yaml, parse_yaml, validate
from eeplan.sim.parameters import layer_parameters, vocabulary_parameters
from eeplan.sim.planner import make_plan
from eeplan.spec import RunSpec

LINK = Transfer(latency_s=1e-5, bandwidth_bytes_per_s=1e10)
CLUSTER = Cluster("some GPU", 10**10, LINK, LINK)


def entries(size: int, layers: int = 8) -> list[list[float]]:
    """Embedding, layers (the first one slower), head; the update is per layer."""
    rest = [[0.010 * size, 0.020 * size, 0.001] for _ in range(layers - 1)]
    return [[0.001, 0.0, 0.001], [0.018 * size, 0.020 * size, 0.001], *rest, [0.004 * size, 0.006, 0.001]]


def memory(run: RunSpec) -> dict[str, list[int]]:
    matrix, layer = 4 * vocabulary_parameters(run), 4 * layer_parameters(run)
    count = run.model.num_layers
    return {
        "params_bytes": [matrix, *[layer] * count, matrix],
        "act_mem_bytes": [100, *range(1000, 1000 + count), 5000],
    }


def document(run: RunSpec, **more: Any) -> dict[str, Any]:
    return {
        "note": "made up, free to use",
        "model": "M",
        "gpu": "G-80",
        "op_times_s": {f"mb{size}_tp1": entries(size) for size in (1, 4)},
        "layer_memory_per_sequence_bytes": {"tp1": memory(run)},
    } | more


def read(folder: Path, content: dict[str, Any], name: str | None = None) -> OpTable:
    path = folder / "table.json"
    path.write_text(json.dumps(content))
    return read_op_table(path, name)


def test_what_was_measured_is_taken_over(tmp_path: Path) -> None:
    run = make_run(training__micro_batch_size=4)
    table = read(tmp_path, document(run))
    assert (table.name, table.num_layers) == ("M/G-80", 8)
    profile = profile_from_table(table, run, CLUSTER)
    profile.require_shape_of(run)
    layer = profile.cost("layer", 4)
    assert layer.forward.mean_s == pytest.approx(4 * (0.018 + 7 * 0.010) / 8), "sums over layers are kept"
    assert layer.forward.median_s == pytest.approx(0.04)
    assert layer.forward.n == 8
    assert layer.kept_bytes == round(4 * (1000 + 1007) / 2)
    assert not layer.extrapolated
    assert profile.cost("final_head", 4).backward.mean_s == pytest.approx(0.006)
    assert profile.cost("embedding", 1).kept_bytes == 100
    parameters = 2 * vocabulary_parameters(run) + 8 * layer_parameters(run)
    assert profile.optimizer.per_parameter_s == pytest.approx(0.010 / parameters)
    assert profile.software["source"] == "made up, free to use"
    assert (profile.device.name, profile.device.kind) == ("some GPU", "cuda")


def test_what_was_not_measured_is_marked_and_the_plan_lists_it(tmp_path: Path) -> None:
    run = make_run(training__micro_batch_size=4, exits={"count": 1, "head": "mlp"})
    profile = profile_from_table(read(tmp_path, document(run)), run, CLUSTER)
    marked = {cost.op for cost in profile.ops if cost.extrapolated}
    assert marked == {"exit_minimal", "exit_norm", "exit_mlp", "exit_block"}
    head, layer = profile.cost("final_head", 4), profile.cost("layer", 4)
    norm, mlp, block = (profile.cost(f"exit_{kind}", 4) for kind in ("norm", "mlp", "block"))  # type: ignore[arg-type]
    assert norm.forward.mean_s == head.forward.mean_s
    assert head.forward.mean_s < mlp.forward.mean_s < block.forward.mean_s
    assert block.forward.mean_s == pytest.approx(head.forward.mean_s + layer.forward.mean_s)
    assert block.kept_bytes == head.kept_bytes + layer.kept_bytes
    plan = make_plan(run, "0" * 64, profile, "1" * 64)
    assert plan.extrapolated_ops == ("exit_mlp",)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 12), slope=st.floats(0.0, 1.0), start=st.floats(0.0, 1.0))
def test_other_microbatch_sizes_lie_on_a_line(size: int, slope: float, start: float) -> None:
    run = make_run(training__micro_batch_size=size, training__global_batch_size=8 * size)

    def rows(at: int) -> tuple[Any, ...]:
        from eeplan.optables import LayerTimes

        return tuple(LayerTimes(start + slope * at, 2 * (start + slope * at), 0.0) for _ in range(4))

    sizes = (2, 4, 8)
    table = OpTable("t", "s", {(at, 1): rows(at) for at in sizes}, {})
    cost = profile_from_table(table, run, CLUSTER).cost("layer", size)
    assert cost.forward.mean_s == pytest.approx(start + slope * size, abs=1e-9)
    assert cost.backward.mean_s == pytest.approx(2 * (start + slope * size), abs=1e-9)
    assert cost.extrapolated, "bytes come from shapes, too"
    assert cost.interpolated == (size in (3, 5, 6, 7))


def test_interpolation_is_marked_even_with_measured_bytes(tmp_path: Path) -> None:
    run = make_run()
    profile = profile_from_table(read(tmp_path, document(run)), run, CLUSTER)
    assert profile.cost("layer", 2).interpolated
    assert not profile.cost("layer", 2).extrapolated
    assert not profile.cost("layer", 1).interpolated
    assert profile.cost("layer", 2).forward.mean_s == pytest.approx(2 * (0.018 + 7 * 0.010) / 8)


def test_a_collection_needs_a_name(tmp_path: Path) -> None:
    run = make_run()
    one = {f"mb{size}_tp1": entries(size) for size in (1, 2)}
    content = {
        "note": "free",
        "profiles": {"M/A": one, "M/B": one, "N/A": one},
        "layer_memory": {"M": {"tp1": memory(run)}},
    }
    table = read(tmp_path, content, "M/B")
    assert table.name == "M/B"
    assert table.bytes[1][1].kept_bytes == 1000
    assert read(tmp_path, content, "N/A").bytes == {}
    for name in (None, "M/C"):
        with pytest.raises(EeplanError, match="choose one with --name: M/A, M/B, N/A"):
            read(tmp_path, content, name)


def test_csv_says_the_same_as_json(tmp_path: Path) -> None:
    run = make_run()
    bytes_of = memory(run)
    lines = ["micro_batch_size,tensor_parallel,layer,forward_s,backward_s,update_s,kept_bytes,params_bytes"]
    for size in (1, 4):
        for index, row in enumerate(entries(size)):
            kept, parameters = bytes_of["act_mem_bytes"][index], bytes_of["params_bytes"][index]
            lines.append(f"{size},1,{index},{','.join(map(str, row))},{kept},{parameters}")
    path = tmp_path / "table.csv"
    path.write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    table, other = read_op_table(path), read(tmp_path, document(run))
    assert dict(table.times) == dict(other.times)
    assert dict(table.bytes) == dict(other.bytes)
    assert table.name == "table"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no op times"),
        ("layer,forward_s\n1,2\n", "line 2: missing key 'micro_batch_size'"),
        ("micro_batch_size,layer,forward_s,backward_s\n1,0,a,1\n", "forward_s"),
        ("micro_batch_size,layer,forward_s,backward_s\n1,0,1,1\n1,0,1,1\n", "layer 0 is given twice"),
        ("micro_batch_size,layer,forward_s,backward_s\n1,0,1,1\n1,2,1,1\n1,3,1,1\n", "layer 1 is missing"),
        ("micro_batch_size,layer,forward_s,backward_s\n1,0,1,1\n1,1,1,1\n", "at least 3 entries"),
    ],
)
def test_other_csv_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(EeplanError) as caught:
        read_op_table(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.clear(), "missing key 'op_times_s'"),
        (lambda d: d["op_times_s"].clear(), "no op times"),
        (lambda d: d["op_times_s"].update(mb0_tp1=entries(1)), "expected a key such as 'mb1_tp1'"),
        (lambda d: d["op_times_s"].update(mb2_tp1=entries(1, 3)), "lists of 5, 10 entries"),
        (lambda d: d["op_times_s"]["mb1_tp1"][1].pop(), "op_times_s.mb1_tp1[1]"),
        (lambda d: d.update(layer_memory_per_sequence_bytes={"1": {}}), "layer_memory_per_sequence_bytes"),
    ],
)
def test_other_json_files_are_refused_in_one_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    content = document(make_run())
    change(content)
    with pytest.raises(EeplanError) as caught:
        read(tmp_path, content)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "nonsense", '"x"', "[" * 100_000, "\xff"])
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(EeplanError) as caught:
        read_op_table(path)
    assert "\n" not in str(caught.value)


def test_a_table_of_another_model_is_refused_with_the_number_to_change(tmp_path: Path) -> None:
    table = read(tmp_path, document(make_run()))
    with pytest.raises(ProfileError, match=r"set model\.ffn_hidden_size near 192"):
        profile_from_table(table, make_run(model__ffn_hidden_size=256), CLUSTER)
    with pytest.raises(ProfileError, match=r"set model\.vocab_size near 256"):
        profile_from_table(table, make_run(model__vocab_size=1024), CLUSTER)
    with pytest.raises(ProfileError, match=r"has no tensor_model_parallel_size 2; it has \[1\]"):
        profile_from_table(table, make_run(parallel__tensor_model_parallel_size=2), CLUSTER)


def test_a_norm_with_its_own_entry_counts_to_the_head(tmp_path: Path) -> None:
    run = make_run(training__micro_batch_size=4)
    content = document(run)
    for rows in content["op_times_s"].values():
        rows.insert(-1, [0.002, 0.003, 0.0])
    parameters = content["layer_memory_per_sequence_bytes"]["tp1"]
    parameters["params_bytes"].insert(-1, 4 * run.model.hidden_size)
    parameters["act_mem_bytes"].insert(-1, 70)
    table = read(tmp_path, content)
    assert table.num_layers == 8
    profile = profile_from_table(table, run, CLUSTER)
    assert profile.cost("final_head", 4).forward.mean_s == pytest.approx(0.016 + 0.002)
    assert profile.cost("final_head", 4).kept_bytes == 4 * 5070
    assert profile.cost("layer", 4).forward.n == 8


def test_a_table_without_an_output_head_is_refused(tmp_path: Path) -> None:
    run = make_run(model__vocab_size=4096)
    content = document(run)
    for rows in content["op_times_s"].values():
        rows[-1] = [1e-5, 1e-5, 0.0]
    table = read(tmp_path, content)
    with pytest.raises(ProfileError, match="it lacks the output head"):
        profile_from_table(table, run, CLUSTER)
    assert profile_from_table(table, run, CLUSTER, check_model=False).ops


def test_a_tied_head_may_be_listed_without_its_matrix(tmp_path: Path) -> None:
    run = make_run()
    content = document(run)
    content["layer_memory_per_sequence_bytes"]["tp1"]["params_bytes"][-1] = 4 * run.model.hidden_size
    assert profile_from_table(read(tmp_path, content), run, CLUSTER).ops


def test_one_size_makes_no_line(tmp_path: Path) -> None:
    content = document(make_run(), op_times_s={"mb1_tp1": entries(1)})
    with pytest.raises(ProfileError, match="a line to 2 needs two"):
        profile_from_table(read(tmp_path, content), make_run(), CLUSTER)


def test_an_imported_profile_survives_its_file(tmp_path: Path) -> None:
    run = make_run(training__micro_batch_size=4)
    profile = profile_from_table(read(tmp_path, document(run)), run, CLUSTER)
    assert validate(parse_yaml(dump_yaml(profile).encode(), "profile"), OpProfile, "profile") == profile


def test_published_tables_are_read(validation_data: Path) -> None:
    path = validation_data / "gpu_op_profiles.json"
    names = json.loads(path.read_text())["profiles"]
    for name in names:
        table = read_op_table(path, name)
        assert table.num_layers >= 24
        assert "MIT licence" in table.source
