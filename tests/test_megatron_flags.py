"""Plans as Megatron-LM and EE-LLM command lines, and back."""

from __future__ import annotations

import shlex

import pytest
from builders import make_plan, make_profile, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import SpecError
from eeplan.megatron_flags import (
    concrete_run,
    flags_of_plan,
    layout_string,
    parse_layout,
)
from eeplan.megatron_reader import read_script
from eeplan.sim.layout import Layout, layout_of
from eeplan.spec import RunSpec

splits = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(lambda split: Layout(tuple(split)))


def back(plan_run: RunSpec, **arguments: object) -> tuple[RunSpec, RunSpec, tuple[str, ...]]:
    """The concrete run of a plan, the run read back from its EE-LLM script, and the notes."""
    profile = make_profile(plan_run)
    lines = {"p2p_between_nodes": profile.p2p, "all_reduce_between_nodes": profile.all_reduce}
    plan = make_plan(plan_run, profile.model_copy(update=lines))
    flags = flags_of_plan(plan)
    script = read_script(flags.script("ee-llm"), "script")
    assert script.not_understood == ()
    assert script.assumed == ()
    return concrete_run(plan), script.run, flags.notes


@st.composite
def runs(draw: st.DrawFn) -> RunSpec:
    stages = draw(st.sampled_from([1, 2, 4]))
    exits = draw(
        st.sampled_from([{}, {"count": 1}, {"count": 2}, {"layers": [{"layer": 2, "weight": 0.125}]}])
    )
    if exits:
        exits = exits | {
            "head": draw(st.sampled_from(["minimal", "norm", "block"])),
            "exit_forward": "deferred",
        }
        if draw(st.booleans()):
            exits["loss_weights"] = {"warmup": {"style": "cosine", "init": 0.5, "iters": 3}}
    untied = draw(st.booleans())
    if exits:
        exits["untie_exit_output_weights"] = untied or draw(st.booleans())
    finite = st.floats(1e-9, 0.5, allow_nan=False)
    tp = draw(st.sampled_from([1, 2]))
    precision: dict[str, object] = {"training__precision": draw(st.sampled_from(["fp32", "bf16", "fp16"]))}
    if precision["training__precision"] == "fp16":
        precision |= {
            "training__loss_scale": draw(st.sampled_from([None, 1024.0])),
            "training__initial_loss_scale": draw(st.sampled_from([2.0**32, 2.0**16])),
            "training__min_loss_scale": draw(st.sampled_from([1.0, 0.5])),
            "training__loss_scale_window": draw(st.sampled_from([1000, 50])),
            "training__hysteresis": draw(st.sampled_from([1, 2])),
        }
    return make_run(
        name="from_script",
        parallel__pipeline_model_parallel_size=stages,
        parallel__tensor_model_parallel_size=tp,
        parallel__data_parallel_size=draw(st.sampled_from([1, 2])),
        parallel__sequence_parallel=tp > 1 and draw(st.booleans()),
        parallel__use_distributed_optimizer=draw(st.booleans()),
        parallel__overlap_grad_reduce=draw(st.booleans()),
        parallel__gpus_per_node=draw(st.sampled_from([None, 2, 4])),
        training__recompute_granularity=draw(st.sampled_from([None, "full", "selective"])),
        training__hidden_dropout=draw(st.sampled_from([0.0, 0.1])),
        training__attention_dropout=draw(st.sampled_from([0.0, 0.2])),
        **precision,
        model__num_query_groups=draw(st.sampled_from([None, 2])),
        model__ffn_hidden_size=draw(st.sampled_from([None, 128])),
        model__vocab_size=draw(st.integers(200, 999)),
        model__untie_embeddings_and_output_weights=untied,
        training__lr=draw(finite),
        training__weight_decay=draw(finite),
        training__lr_decay_style=draw(st.sampled_from(["constant", "linear", "cosine"])),
        training__seed=draw(st.integers(1, 10**6)),
        training__adam_beta2=draw(st.floats(0.0, 0.99)),
        data={"data_path": "/d/te xt", "tokenizer": "/d/t'ok.json", "split": "9,1,0"},
        exits=exits,
    )


@settings(max_examples=40, deadline=None)
@given(runs())
def test_a_plan_survives_its_command_line(run: RunSpec) -> None:
    wanted, read, notes = back(run)
    # What EE-LLM cannot say is noted, and nothing else may differ.
    if any("reads all exits before" in note for note in notes):
        assert {e.depth for e in read.exits.layers} == {e.depth for e in wanted.exits.layers}
        read, wanted = (one.model_copy(update={"exits": run.exits}) for one in (read, wanted))
    assert rounded(read) == rounded(wanted.model_copy(update={"name": "from_script"}))


def rounded(run: RunSpec) -> RunSpec:
    """A warm-up's start goes through a product and a quotient on its way."""
    warmup = run.exits.loss_weights.warmup
    if warmup is None:
        return run
    warmup = warmup.model_copy(update={"init": round(warmup.init, 9)})
    weights = run.exits.loss_weights.model_copy(update={"warmup": warmup})
    return run.model_copy(update={"exits": run.exits.model_copy(update={"loss_weights": weights})})


def test_a_changed_flag_is_seen_in_the_run_read_back() -> None:
    """Negative control: every flag that stands for a field matters."""
    run = make_run(
        exits={"count": 1, "exit_forward": "deferred"},
        parallel__tensor_model_parallel_size=2,
        parallel__sequence_parallel=True,
        parallel__use_distributed_optimizer=True,
        parallel__overlap_grad_reduce=True,
        training__recompute_granularity="full",
        training__precision="fp16",
        training__hidden_dropout=0.25,
    )
    plan = make_plan(run, make_profile(run))
    flags = flags_of_plan(plan)
    text = flags.script("ee-llm")
    wanted = read_script(text, "script").run
    for flag, other in (
        ("--hidden-size 64", "--hidden-size 128"),
        ("--lr 0.001", "--lr 0.002"),
        ("--split 95,5,0", "--split 9,1,0"),
        ("--exit-layer-weight 0.5", "--exit-layer-weight 0.25"),
        ("--use-exit-norm", "--use-exit-block --use-exit-norm"),
        ("--nproc-per-node 4", "--nproc-per-node 8"),
        ("--hidden-dropout 0.25", "--hidden-dropout 0.5"),
        ("--initial-loss-scale 4294967296.0", "--initial-loss-scale 2.0"),
        ("--recompute-granularity full", "--recompute-granularity selective"),
        ("--use-distributed-optimizer", "--disable-bias-linear"),
        ("--overlap-grad-reduce", "--disable-bias-linear"),
        ("--sequence-parallel", "--disable-bias-linear"),
        ("--fp16", "--bf16"),
    ):
        assert flag in text, flag
        assert read_script(text.replace(flag, other, 1), "script").run != wanted, flag


def test_fill_counts_are_said_where_ee_llm_knows_them() -> None:
    fill = {"policy": {"warmup": 1, "cooldown": 1}, "mode": "same_count"}
    run = make_run(
        parallel__pipeline_model_parallel_size=4,
        exits={"layers": [{"layer": 2}], "exit_forward": "deferred"},
        fill=fill,
    )
    wanted, read, notes = back(run)
    assert read.fill == wanted.fill
    assert read.fill.mode == "same_count"
    assert any("EE-LLM corrects nothing" in note for note in notes)
    added = run.model_copy(update={"fill": run.fill.model_copy(update={"mode": "added"})})
    assert any("on top of the global batch" in note for note in back(added)[2])


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ({"exits": {"layers": [{"layer": 7}], "exit_forward": "deferred"}}, "an exit on the last stage"),
        ({"exits": {"count": 1, "exit_forward": "eager"}}, "always defers"),
        ({"exits": {"count": 1, "temperature": 2.0}}, "temperatures of the exits' losses"),
        ({"exits": {"layers": [{"layer": 2, "temperature": 2.0}]}}, "temperatures of the exits' losses"),
        ({"exits": {"count": 1, "loss_weights": {"dynamic": True}}}, "weighed by the exit's confidence"),
        ({"exits": {"count": 1, "distillation": {"weight": 0.5}}}, "distilled from the final one"),
        ({"parallel__layer_split": [3, 5], "exits": {"layers": [{"layer": 2}]}}, "EE-LLM makes all equal"),
        (
            {"exits": {"layers": [{"layer": 2, "head": "norm"}, {"layer": 3, "head": "minimal"}]}},
            "EE-LLM gives all exits one kind, here norm",
        ),
        (
            {"exits": {"layers": [{"layer": 2, "tied": True}, {"layer": 3, "tied": False}]}},
            "ties all or none",
        ),
        # Inside a stage, before a layer is after the one below it.
        ({"exits": {"layers": [{"layer": 2}, {"layer": 4, "boundary": "before"}]}}, None),
        (
            {
                "parallel__pipeline_model_parallel_size": 4,
                "exits": {"layers": [{"layer": 2}, {"layer": 5, "boundary": "before"}]},
            },
            "the exit after layer 2, at the end of its stage, moves",
        ),
        (
            {"model__untie_embeddings_and_output_weights": True, "exits": {"layers": [{"layer": 2}]}},
            "EE-LLM refuses that",
        ),
    ],
)
def test_what_ee_llm_cannot_say_is_noted(overrides: dict[str, object], part: str | None) -> None:
    run = make_run(**overrides)
    notes = flags_of_plan(make_plan(run, make_profile(run))).notes
    if part is None:
        assert notes == ()
    else:
        assert any(part in note for note in notes), notes


def test_uneven_stages_come_back_through_stock_megatron() -> None:
    run = make_run(parallel__layer_split=[3, 5], name="from_script")
    plan = make_plan(run, make_profile(run))
    flags = flags_of_plan(plan)
    assert flags.layout == ("--pipeline-model-parallel-layout", "Et*3|t*5,L")
    read = read_script(flags.script("megatron"), "script")
    assert read.run.parallel.layer_split == (3, 5)
    assert read.run == concrete_run(plan).model_copy(update={"name": "from_script"})


@settings(max_examples=100, deadline=None)
@given(splits)
def test_layout_strings_survive(layout: Layout) -> None:
    assert parse_layout(layout_string(layout)) == layout


@settings(max_examples=60, deadline=None)
@given(splits)
def test_megatron_reads_the_same_layout(layout: Layout) -> None:
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    reader = module.PipelineParallelLayerLayout(layout_string(layout), layout.num_stages)
    reader.validate_layer_layout(layout.num_layers, None)
    counts = [reader.get_num_layers_to_build(pp_rank=stage, vp_stage=0) for stage in range(layout.num_stages)]
    assert tuple(counts) == layout.layers_per_stage


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("Ettt|(tt|)*3,tL", (3, 2, 2, 2, 1)),
        ("Et*2|t*2L", (2, 2)),
        ("E,t|t,L", (1, 1)),
        ("EtL", (1,)),
    ],
)
def test_megatrons_repetitions_are_read(text: str, split: tuple[int, ...]) -> None:
    assert parse_layout(text).layers_per_stage == split


@pytest.mark.parametrize(
    "text", ["", "tt|tt", "Et|L", "Et|mL", "E|tL", "Ett|t", "Et*9999999999|tL", "E(t*9999|)*9999,tL", "Ex|tL"]
)
def test_other_layouts_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_layout(text)
    assert "pipeline layout" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_script_is_one_command_that_a_shell_splits_the_same_way() -> None:
    run = make_run(exits={"count": 1})
    flags = flags_of_plan(make_plan(run, make_profile(run)))
    lines = [line for line in flags.script("ee-llm").splitlines() if not line.startswith("#")]
    words = shlex.split(" ".join(line.rstrip("\\") for line in lines))
    assert words[0] == "torchrun"
    assert words[4:] == list(flags.words("ee-llm"))
    assert words[3] == "pretrain_early_exit_gpt.py"
    assert layout_of(concrete_run(make_plan(run, make_profile(run)))).num_layers == 8
