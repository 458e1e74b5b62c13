from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from builders import make_plan, make_profile, make_run
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.exhaustive import NaiveExit, NaiveStage

from eeplan.errors import ProfileError
from eeplan.plan import load_plan, write_plan
from eeplan.profile import OpProfile, Transfer
from eeplan.sim.costs import (
    CostModel,
    StageCosts,
    cost_model,
    grad_sync_ns,
    pipeline_costs,
    pipeline_costs_of,
    shared_matrix_sync_ns,
    stage_costs,
    to_ns,
)
from eeplan.sim.layout import layout_of, uniform_layout
from eeplan.sim.memory import iteration_peak_bytes
from eeplan.sim.parameters import Head
from eeplan.sim.reductions import ring_all_reduce_s
from eeplan.spec import HEAD_KINDS, RunSpec


def compose(
    run: RunSpec, profile: OpProfile, heads: list[int], mode: str = "deferred"
) -> tuple[CostModel, tuple[StageCosts, ...]]:
    """All stages of ``run`` with that many of its exits on each."""
    model = cost_model(run, profile, layout_of(run), {run.exits.head})
    head = Head(run.exits.head, tied=not run.exits.untie_exit_output_weights)
    return model, tuple(stage_costs(model, i, (head,) * count, mode) for i, count in enumerate(heads))


def exits_on(run: RunSpec, counts: list[int]) -> list[NaiveExit]:
    """The deepest depths of each stage, read after their layers."""
    exits = []
    for stage, count in enumerate(counts):
        last = layout_of(run).last_layer(stage) - (stage == len(counts) - 1)
        exits += [NaiveExit(last - i, "after", stage) for i in range(count)]
    return exits


def split_of_eight(draw: st.DrawFn, stages: int) -> list[int]:
    """Eight layers over ``stages``, equal or not."""
    if draw(st.booleans()):
        return [8 // stages] * stages
    cuts = sorted(draw(st.sets(st.integers(1, 7), min_size=stages - 1, max_size=stages - 1)))
    return [b - a for a, b in pairwise((0, *cuts, 8))]


@st.composite
def composed_cases(draw: st.DrawFn) -> tuple[RunSpec, OpProfile, list[int], str]:
    stages = draw(st.sampled_from([1, 2, 4]))
    split = split_of_eight(draw, stages)
    tp = draw(st.sampled_from([1, 2]))
    run = make_run(
        parallel__layer_split=split,
        parallel__pipeline_model_parallel_size=stages,
        parallel__tensor_model_parallel_size=tp,
        parallel__data_parallel_size=draw(st.sampled_from([1, 2, 4])),
        parallel__sequence_parallel=tp > 1 and draw(st.booleans()),
        parallel__use_distributed_optimizer=draw(st.booleans()),
        parallel__overlap_grad_reduce=draw(st.booleans()),
        parallel__gpus_per_node=draw(st.sampled_from([None, 2, 4, 6])),
        training__recompute_granularity=draw(st.sampled_from([None, "full", "selective"])),
        model__num_layers=8,
        model__num_query_groups=draw(st.sampled_from([2, 4])),
        model__untie_embeddings_and_output_weights=draw(st.booleans()),
        training__precision=draw(st.sampled_from(["fp32", "bf16"])),
        exits__head=draw(st.sampled_from(HEAD_KINDS)),
        exits__untie_exit_output_weights=draw(st.booleans()),
    )
    op_bytes = {
        op: tuple(draw(st.lists(st.integers(0, 200_000), min_size=3, max_size=3)))
        for op in ("embedding", "layer", "final_head", f"exit_{run.exits.head}")
    }
    profile = make_profile(run, seed=draw(st.integers(0, 99)), jitter=0.5, op_bytes=op_bytes)
    if run.parallel.num_nodes > 1:
        slow = Transfer(latency_s=3e-4, bandwidth_bytes_per_s=1e8)
        profile = profile.model_copy(update={"p2p_between_nodes": slow, "all_reduce_between_nodes": slow})
    room = [*split[:-1], split[-1] - 1]
    counts = [draw(st.integers(0, min(2, slots))) for slots in room]
    return run, profile, counts, draw(st.sampled_from(["deferred", "eager"]))


@settings(max_examples=60, deadline=None)
@given(composed_cases())
def test_stages_equal_a_naive_walk_over_their_ops(case: tuple[RunSpec, OpProfile, list[int], str]) -> None:
    run, profile, counts, mode = case
    model, stages = compose(run, profile, counts, mode)
    peaks = iteration_peak_bytes(model, stages)
    for index, stage in enumerate(stages):
        naive = NaiveStage(run, profile, layout_of(run).layers_per_stage, index, exits_on(run, counts), mode)
        assert stage.forward_ns == naive.forward_ns()
        assert stage.backward_ns == naive.backward_ns()
        assert stage.parameters == naive.parameters()
        assert stage.holds_shared_matrix == naive.holds_shared_matrix()
        assert stage.data_sync_ns == pytest.approx(naive.data_sync_ns(), abs=20)
        assert stage.optimizer_ns == pytest.approx(naive.step_ns(), abs=1)
        assert peaks[index] == naive.peak_bytes()


@settings(max_examples=40, deadline=None)
@given(composed_cases())
def test_waiting_exit_gradients_are_overstated_by_at_most_one_message_each(
    case: tuple[RunSpec, OpProfile, list[int], str],
) -> None:
    run, profile, counts, mode = case
    model, stages = compose(run, profile, counts, mode)
    for index, peak in enumerate(iteration_peak_bytes(model, stages)):
        exact = NaiveStage(
            run,
            profile,
            layout_of(run).layers_per_stage,
            index,
            exits_on(run, counts),
            mode,
            exact_gradients=True,
        )
        assert 0 <= peak - exact.peak_bytes() <= counts[index] * model.hidden_bytes


def test_swapped_ops_are_noticed() -> None:
    """Negative control of the walk: the profile of another op gives other stages."""
    run = make_run(exits__head="mlp")
    profile = make_profile(run)
    names = {"layer": "exit_mlp", "exit_mlp": "layer"}
    swapped = profile.model_copy(
        update={
            "ops": tuple(op.model_copy(update={"op": names.get(op.op, op.op)}) for op in profile.ops),
        }
    )
    _, stages = compose(run, swapped, [1, 0])
    naive = NaiveStage(run, profile, (4, 4), 0, exits_on(run, [1, 0]), "deferred")
    assert stages[0].forward_ns != naive.forward_ns()
    assert stages[0].kept_bytes != compose(run, profile, [1, 0])[1][0].kept_bytes


def test_the_whole_untied_model_counts_every_parameter_once() -> None:
    run = make_run(model__untie_embeddings_and_output_weights=True, model__num_query_groups=2)
    _, stages = compose(run, make_profile(run), [0, 0])
    h, ffn, vocab = 64, 192, 256
    layer = h * h + 2 * h * 32 + h * h + 3 * h * ffn + 2 * h
    assert sum(stage.parameters for stage in stages) == 8 * layer + 2 * h * vocab + h


@pytest.mark.parametrize(
    ("tied_model", "tied_exits", "replicas"),
    # Matrices on (first, second, third, fourth) stage with one exit on each.
    [
        (True, True, (1, 1, 1, 1)),
        (True, False, (2, 1, 1, 2)),
        (False, True, (2, 1, 1, 1)),
        (False, False, (2, 1, 1, 2)),
    ],
)
def test_vocabulary_matrices_per_stage(tied_model: bool, tied_exits: bool, replicas: tuple[int, ...]) -> None:
    run = make_run(
        parallel__pipeline_model_parallel_size=4,
        model__untie_embeddings_and_output_weights=not tied_model,
        exits__untie_exit_output_weights=not tied_exits,
        exits__head="minimal",
    )
    _, stages = compose(run, make_profile(run), [1, 1, 1, 1])
    _, bare = compose(make_run(parallel__pipeline_model_parallel_size=4), make_profile(run), [0, 0, 0, 0])
    layers = bare[1].parameters
    norm = (0, 0, 0, 64)
    assert [s.parameters - layers - n for s, n in zip(stages, norm, strict=True)] == [
        count * 64 * 256 for count in replicas
    ]


def test_an_exit_moves_between_forward_and_backward_with_its_mode() -> None:
    run = make_run()
    profile = make_profile(run, op_seconds={"exit_norm": (0.25, 0.5)})
    _, bare = compose(run, profile, [0, 0])
    _, deferred = compose(run, profile, [1, 0], "deferred")
    _, eager = compose(run, profile, [1, 0], "eager")
    quarter = 250_000_000
    assert deferred[0].forward_ns == bare[0].forward_ns
    assert deferred[0].backward_ns == bare[0].backward_ns + 3 * quarter
    assert eager[0].forward_ns == bare[0].forward_ns + quarter
    assert eager[0].backward_ns == bare[0].backward_ns + 2 * quarter
    assert deferred[0].exit_ns == eager[0].exit_ns == 3 * quarter
    assert deferred[0].kept_bytes == bare[0].kept_bytes < eager[0].kept_bytes


def test_first_and_last_stage_carry_embedding_and_final_head() -> None:
    run = make_run(parallel__pipeline_model_parallel_size=4)
    seconds = {"embedding": (1e-3, 2e-3), "layer": (5e-3, 7e-3), "final_head": (11e-3, 13e-3)}
    profile = make_profile(run, op_seconds=seconds, microbatch_overhead_s=1e-6)
    _, stages = compose(run, profile, [0, 0, 0, 0])
    assert [s.forward_ns for s in stages] == [11_001_000, 10_001_000, 10_001_000, 21_001_000]
    assert [s.backward_ns for s in stages] == [16_000_000, 14_000_000, 14_000_000, 27_000_000]
    assert [s.output_bytes for s in stages] == [2 * 32 * 64 * 4] * 3 + [0]


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_messages_have_the_width_of_the_precision(precision: str, width: int) -> None:
    run = make_run(training__precision=precision)
    model, _ = compose(run, make_profile(run), [0, 0])
    assert model.hidden_bytes == 2 * 32 * 64 * width


def test_a_ring_moves_less_than_twice_the_bytes() -> None:
    pair = Transfer(latency_s=1.0, bandwidth_bytes_per_s=10.0)
    assert ring_all_reduce_s(pair, 100, 1) == 0.0
    assert ring_all_reduce_s(pair, 100, 2) == pair.seconds(100)
    assert ring_all_reduce_s(pair, 100, 4) == pytest.approx(3.0 + 15.0)


def test_the_shared_matrix_is_reduced_only_between_several_copies() -> None:
    untied = make_run(model__untie_embeddings_and_output_weights=True)
    model, stages = compose(untied, make_profile(untied), [0, 0])
    assert [stage.holds_shared_matrix for stage in stages] == [False, True]
    assert shared_matrix_sync_ns(model, stages) == 0
    tied = make_run()
    model, stages = compose(tied, make_profile(tied), [0, 0])
    assert shared_matrix_sync_ns(model, stages) == to_ns(model.profile.all_reduce.seconds(4 * 64 * 256))
    _, with_exit = compose(tied, make_profile(tied), [0, 1])
    assert shared_matrix_sync_ns(model, with_exit) == shared_matrix_sync_ns(model, stages)


def test_data_parallel_reduction_hides_in_the_drain_of_later_stages() -> None:
    run = make_run(parallel__data_parallel_size=2, model__untie_embeddings_and_output_weights=True)
    _, stages = compose(run, make_profile(run), [0, 0])
    first, last = (replace(stage, data_sync_ns=ns) for stage, ns in zip(stages, (100, 500), strict=True))
    # The last stage ends 1000 early, so its longer reduction is done first.
    assert grad_sync_ns([5000, 4000], [first, last], 0) == 100
    assert grad_sync_ns([5000, 5000], [first, last], 0) == 500
    # The shared matrix waits for the stages that hold it, here only the last.
    assert grad_sync_ns([5000, 4000], [first, last], 700) == 200


@pytest.mark.parametrize("mode", ["deferred", "eager"])
def test_a_plan_alone_gives_the_same_costs(mode: str, tmp_path: Path) -> None:
    run = make_run(exits__count=2, exits__exit_forward=mode, parallel__pipeline_model_parallel_size=4)
    profile = make_profile(run, jitter=0.3)
    write_plan(tmp_path / "plan.yaml", make_plan(run, profile))
    plan = load_plan(tmp_path / "plan.yaml")
    counts = [len(stage.exit_depths) for stage in plan.stages]
    model, stages = compose(run, profile, counts, mode)
    assert pipeline_costs_of(plan) == pipeline_costs(model, stages)


def test_a_profile_of_another_model_or_size_is_refused() -> None:
    run = make_run()
    layout = uniform_layout(8, 2)
    with pytest.raises(ProfileError, match=r"hidden_size 128, the run file has 64.*eeplan profile"):
        cost_model(run, make_profile(make_run(model__hidden_size=128)), layout, {"norm"})
    with pytest.raises(ProfileError, match=r"no 'embedding' at micro_batch_size 2.*\[4\]"):
        cost_model(run, make_profile(make_run(training__micro_batch_size=4)), layout, {"norm"})


def test_only_the_ops_in_use_are_needed_and_reported() -> None:
    run = make_run()
    profile = make_profile(run, extrapolated=("layer", "exit_mlp"))
    without_norm = profile.model_copy(update={"ops": tuple(o for o in profile.ops if o.op != "exit_norm")})
    layout = uniform_layout(8, 2)
    assert cost_model(run, without_norm, layout, set()).extrapolated_ops == ("layer",)
    assert cost_model(run, without_norm, layout, {"mlp"}).extrapolated_ops == ("layer", "exit_mlp")
    with pytest.raises(ProfileError, match="'exit_norm'"):
        cost_model(run, without_norm, layout, {"norm"})
