from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import make_run, run_document, write_run
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import FileError, SchemaError, SpecError
from eeplan.schema import dump_yaml, parse_yaml, validate
from eeplan.spec import ExitRequest, ModelSpec, RunSpec, load_run, replace_keys, with_data_paths

SPLIT = "parallel__layer_split"
TP = "parallel__tensor_model_parallel_size"
PP = "parallel__pipeline_model_parallel_size"


def refusal(**overrides: Any) -> str:
    with pytest.raises(SchemaError) as caught:
        validate(run_document(**overrides), RunSpec, "run file r.yaml")
    message = str(caught.value)
    assert message.startswith("run file r.yaml: ")
    assert "\n" not in message
    return message.removeprefix("run file r.yaml: ")


def test_a_run_file_round_trips_and_its_data_paths_become_absolute(tmp_path: Path) -> None:
    run = make_run(exits={"layers": [{"layer": 3, "head": "mlp"}]}, training__lr=3e-4)
    loaded, digest = load_run(write_run(tmp_path / "run.yaml", run))
    assert loaded.data.data_path == str(tmp_path / "data" / "text")
    assert loaded.data.tokenizer == str(tmp_path / "data" / "tokenizer.json")
    assert with_data_paths(loaded, lambda p: str(Path(p).relative_to(tmp_path))) == run
    assert len(digest) == 64
    with pytest.raises(FileError, match=r"run file .* does not exist"):
        load_run(tmp_path / "other.yaml")


@settings(deadline=None)
@given(
    st.integers(1, 64),
    st.sampled_from([1, 2, 4]),
    st.floats(1e-9, 1e3),
    st.sampled_from(["auto", 0, 1, None]),
)
def test_any_valid_run_survives_its_yaml(microbatches: int, stages: int, lr: float, count: Any) -> None:
    run = make_run(
        training__global_batch_size=2 * microbatches,
        parallel__pipeline_model_parallel_size=stages,
        training__lr=lr,
        exits__count=count,
    )
    assert validate(parse_yaml(dump_yaml(run).encode(), "run"), RunSpec, "run") == run
    assert run.num_microbatches == microbatches


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__hidden_size": 65}, "model: hidden_size 65 is not divisible by num_attention_heads 4"),
        ({"model__hidden_size": 60}, "is 15; rotary embedding needs an even number"),
        ({"model__num_query_groups": 3}, "num_attention_heads 4 is not divisible by num_query_groups 3"),
        ({TP: 3}, "model.num_attention_heads 4 is not divisible by parallel.tensor_model_parallel_size 3"),
        ({TP: 4, "model__num_query_groups": 2}, "model.num_query_groups 2 is not divisible by"),
        ({TP: 4, "model__ffn_hidden_size": 170}, "model.ffn_hidden_size 170 is not divisible by"),
        ({PP: 3}, "model.num_layers 8 is not divisible by parallel.pipeline_model_parallel_size 3"),
        ({PP: 3}, "or set parallel.layer_split to auto or to layers per stage"),
        ({PP: 9, SPLIT: [1] * 9}, "num_layers 8 is less than parallel.pipeline_model_parallel_size 9"),
        ({SPLIT: [3, 4]}, "layer_split [3, 4] gives 2 stages 7 layers together; expected 2 numbers that add"),
        ({SPLIT: [3, 3, 2]}, "layer_split [3, 3, 2] gives 3 stages"),
        ({SPLIT: [8, 0]}, "key 'parallel.layer_split[1]' has value 0: input should be greater than 0"),
        ({SPLIT: "even"}, "'even' is no layer split; expected uniform, auto or"),
        (
            {"training__global_batch_size": 15},
            "training.global_batch_size 15 is not divisible by micro_batch",
        ),
        ({"parallel__data_parallel_size": 3}, "x data_parallel_size 6"),
        (
            {"training__lr_warmup_iters": 5},
            "training.lr_warmup_iters is 5, more than train_iters 4; lower it",
        ),
        ({"training__min_lr": 0.5}, "training.min_lr 0.5 exceeds training.lr 0.001; lower it"),
        ({"data__split": "90,10"}, "data: split is '90,10'; expected three numbers"),
        ({"data__split": "0,1,1"}, "with a positive first"),
        ({"data__split": "a,b,c"}, "expected three numbers"),
        ({"data__split": "9,-1,1"}, "expected three numbers"),
        ({"data__split": "nan,1,1"}, "expected three numbers"),
        ({"data__split": "9,1,nan"}, "expected three numbers"),
        ({"data__split": "inf,1,0"}, "expected three numbers"),
        ({"data__split": "9,1,1e999"}, "expected three numbers"),
        ({"exits__layers": [{"layer": 9}]}, "exits.layers[0]: exit after layer 9 is outside the model"),
        ({"exits__layers": [{"layer": 2}, {"layer": 8}]}, "exits.layers[1]: exit after layer 8 is the final"),
        ({"exits__layers": [{"layer": 1, "boundary": "before"}]}, "before layer 1 has no layer below it"),
        (
            {"exits__layers": [{"layer": 3}, {"layer": 4, "boundary": "before"}]},
            "exit before layer 4 and exit after layer 3 both read the hidden state after 3 layers",
        ),
        ({"exits": {"layers": [{"layer": 3}], "count": 1}}, "either exits.count or exits.layers, not both"),
        ({"exits__count": 8}, "exits.count is 8; a model of 8 layers has room for 7 early exits"),
        ({"exits__count": "many"}, "input should be 'auto' or a valid integer"),
        ({"exits__count": -1}, "key 'exits.count' has value -1"),
        ({"exits__head": "conv"}, "expected minimal, norm, mlp, block, auto, or a list of kinds"),
        (
            {"exits__layers": [{"layer": 3, "haed": "norm"}]},
            "unknown key 'exits.layers[0].haed'; did you mean",
        ),
        ({"model__num_layer": 3}, "unknown key 'model.num_layer'; did you mean 'num_layers'?"),
        ({"limits__device_memory_bytes": "8GiB"}, "key 'limits.device_memory_bytes' has value '8GiB'"),
        ({"training__precision": "int8"}, "input should be 'fp32', 'bf16' or 'fp16'"),
        ({"schema_version": 2}, "key 'schema_version' has value 2: input should be 1"),
    ],
)
def test_impossible_runs_are_refused_with_the_reason(overrides: dict[str, Any], message: str) -> None:
    assert message in refusal(**overrides)


def test_every_positive_size_refuses_zero_and_words() -> None:
    for key in ("model__num_layers", "training__seq_length", PP, TP, "exits__max_count"):
        assert f"key '{key.replace('__', '.')}' has value 0: input should be greater than 0" in refusal(
            **{key: 0}
        )
        assert "input should be a valid integer" in refusal(**{key: "four"})


@pytest.mark.parametrize("section", ["model", "training", "data"])
def test_missing_sections_are_named(section: str) -> None:
    document = run_document()
    del document[section]
    with pytest.raises(SchemaError, match=f"missing key '{section}'; add it"):
        validate(document, RunSpec, "run")


def test_defaults_follow_the_shape() -> None:
    model = ModelSpec(num_layers=2, hidden_size=2048, num_attention_heads=16, vocab_size=32000)
    assert model.ffn_size == 5504  # 8/3 of 2048 is 5461.3
    assert model.ffn_size % 64 == 0
    assert (model.query_groups, model.head_dim) == (16, 128)


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"), [(256, 1, 256), (257, 1, 384), (257, 2, 512), (50257, 4, 50688)]
)
def test_vocabulary_is_padded_to_equal_shares(vocab: int, tp: int, padded: int) -> None:
    run = make_run(model__vocab_size=vocab, parallel__tensor_model_parallel_size=tp)
    assert run.padded_vocab_size == padded


def test_sizes_derived_from_the_layout() -> None:
    run = make_run(parallel={"data_parallel_size": 2, "pipeline_model_parallel_size": 4})
    assert run.parallel.world_size == 8
    assert run.num_microbatches == 4


def test_depth_counts_the_layers_below() -> None:
    assert ExitRequest(layer=4).depth == ExitRequest(layer=5, boundary="before").depth == 4


def test_keys_can_be_replaced_and_are_checked_again() -> None:
    run = make_run()
    changed = replace_keys(run, {"training.train_iters": 9, "exits.count": 2})
    assert (changed.training.train_iters, changed.exits.count) == (9, 2)
    assert run.training.train_iters == 4
    with pytest.raises(SchemaError, match="room for 7"):
        replace_keys(run, {"exits.count": 8})
    for unknown in ("training.iters", "trainig.lr", "name.x", "training.lr.x"):
        with pytest.raises(SpecError, match=f"no key '{unknown}'"):
            replace_keys(run, {unknown: 1})
