from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from builders import make_profile, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.profile import OpProfile, Transfer
from eeplan.sim.costs import cost_model, pipeline_costs, shared_matrix_sync_ns, stage_costs
from eeplan.sim.engine import message_ns
from eeplan.sim.family import Family, counted_family, placed_family
from eeplan.sim.layout import Layout, layout_of
from eeplan.sim.memory import iteration_peak_bytes
from eeplan.sim.parameters import Head
from eeplan.spec import HEAD_KINDS, ExitForward, HeadKind, RunSpec


@st.composite
def runs(draw: st.DrawFn) -> tuple[RunSpec, OpProfile]:
    stages = draw(st.integers(1, 4))
    tp = draw(st.sampled_from([1, 2]))
    run = make_run(
        parallel__pipeline_model_parallel_size=stages,
        parallel__layer_split=[9 - stages, *[1] * (stages - 1)],
        parallel__tensor_model_parallel_size=tp,
        parallel__data_parallel_size=draw(st.sampled_from([1, 2])),
        parallel__sequence_parallel=tp > 1 and draw(st.booleans()),
        parallel__use_distributed_optimizer=draw(st.booleans()),
        parallel__overlap_grad_reduce=draw(st.booleans()),
        parallel__gpus_per_node=draw(st.sampled_from([None, 2, 4])),
        training__recompute_granularity=draw(st.sampled_from([None, "full", "selective"])),
        model__untie_embeddings_and_output_weights=draw(st.booleans()),
        training__precision=draw(st.sampled_from(["fp32", "bf16"])),
        training__global_batch_size=4 * draw(st.integers(1, 6)),
    )
    sizes = st.lists(st.integers(0, 200_000), min_size=3, max_size=3).map(tuple)
    ops = ("embedding", "layer", "final_head", *(f"exit_{kind}" for kind in HEAD_KINDS))
    profile = make_profile(
        run, seed=draw(st.integers(0, 99)), jitter=0.5, op_bytes={op: draw(sizes) for op in ops}
    )
    slow = Transfer(latency_s=3e-4, bandwidth_bytes_per_s=1e8)
    return run, profile.model_copy(update={"p2p_between_nodes": slow, "all_reduce_between_nodes": slow})


def splits(draw: st.DrawFn, stages: int) -> tuple[int, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, 7), min_size=stages - 1, max_size=stages - 1)))
    return tuple(b - a for a, b in pairwise((0, *cuts, 8)))


def assert_equal_to_composed_stages(
    family: Family,
    run: RunSpec,
    profile: OpProfile,
    layout: Layout,
    heads: list[list[Head]],
    mode: ExitForward,
) -> None:
    """Every stage of one candidate, as the scalar composition has it."""
    model = replace(cost_model(run, profile, layout_of(run), HEAD_KINDS), layout=layout)
    stages = [stage_costs(model, i, tuple(on_stage), mode) for i, on_stage in enumerate(heads)]
    peaks = iteration_peak_bytes(model, stages)
    below = 0
    for index, stage in enumerate(stages):
        layers, above = layout.layers_per_stage[index], below + len(heads[index])
        group = family.group[below, above]
        exits = (array[above] - array[below] for array in (family.exit_forward, family.exit_backward))
        exit_forward, exit_backward = exits
        assert family.forward[index] + layers * family.layer_forward + exit_forward == stage.forward_ns
        assert family.backward[index] + layers * family.layer_backward + exit_backward == stage.backward_ns
        assert family.peak[index, layers, group] == peaks[index] + profile.process_base_bytes
        assert family.sync[index, layers, group] == stage.data_sync_ns
        assert family.step[index, layers, group] == stage.optimizer_ns
        assert family.holder[index, group] == stage.holds_shared_matrix
        below = above
    holders = sum(stage.holds_shared_matrix for stage in stages)
    assert family.shared[holders] == shared_matrix_sync_ns(model, stages)
    assert tuple(family.message) == message_ns(pipeline_costs(model, stages))


@settings(max_examples=60, deadline=None)
@given(runs(), st.data())
def test_equal_exits_cost_what_single_stages_cost(
    case: tuple[RunSpec, OpProfile], data: st.DataObject
) -> None:
    run, profile = case
    stages = run.parallel.pipeline_model_parallel_size
    head = Head(data.draw(st.sampled_from(HEAD_KINDS)), data.draw(st.booleans()))
    mode: ExitForward = data.draw(st.sampled_from(["deferred", "eager"]))
    counts = data.draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages))
    model = cost_model(run, profile, layout_of(run), HEAD_KINDS)
    family = counted_family(model, sum(counts), head, mode, "asynchronous")
    layout = Layout(splits(data.draw, stages))
    assert_equal_to_composed_stages(family, run, profile, layout, [[head] * n for n in counts], mode)
    assert (family.exits_below == -1).all()


@settings(max_examples=60, deadline=None)
@given(runs(), st.data())
def test_exits_at_fixed_places_cost_what_single_stages_cost(
    case: tuple[RunSpec, OpProfile], data: st.DataObject
) -> None:
    run, profile = case
    layers = sorted(data.draw(st.sets(st.integers(1, 7), max_size=3)))
    kinds: list[HeadKind] = [data.draw(st.sampled_from(HEAD_KINDS)) for _ in layers]
    heads = [Head(kind, data.draw(st.booleans())) for kind in kinds]
    mode: ExitForward = data.draw(st.sampled_from(["deferred", "eager"]))
    model = cost_model(run, profile, layout_of(run), HEAD_KINDS)
    family = placed_family(model, heads, layers, mode, "asynchronous")
    layout = Layout(splits(data.draw, run.parallel.pipeline_model_parallel_size))
    on_stages: list[list[Head]] = [[] for _ in layout.layers_per_stage]
    for head, layer in zip(heads, layers, strict=True):
        on_stages[layout.stage_of_layer(layer)].append(head)
    assert_equal_to_composed_stages(family, run, profile, layout, on_stages, mode)
    below = [sum(map(len, on_stages[:stage])) for stage in range(layout.num_stages + 1)]
    assert [
        family.exits_below[sum(layout.layers_per_stage[:s])] for s in range(layout.num_stages + 1)
    ] == below


def test_only_kinds_of_stages_that_fit_are_allowed() -> None:
    run = make_run()
    profile = make_profile(run)
    head = Head("norm", tied=True)
    model = cost_model(run, profile, layout_of(run), {"norm"})
    free = counted_family(model, 1, head, "deferred", "asynchronous")
    assert free.allowed.all()
    limit = int(free.peak[0, 4, 1])
    limits = run.limits.model_copy(update={"device_memory_bytes": limit})
    limited = cost_model(run.model_copy(update={"limits": limits}), profile, layout_of(run), {"norm"})
    allowed = counted_family(limited, 1, head, "deferred", "asynchronous").allowed
    assert allowed[0, 4, 1]
    assert not allowed[0, 5, 1]


def test_a_family_of_another_mode_is_noticed() -> None:
    """Negative control of the comparison."""
    run = make_run()
    profile = make_profile(run, jitter=0.5)
    head = Head("norm", tied=True)
    model = cost_model(run, profile, layout_of(run), HEAD_KINDS)
    family = counted_family(model, 1, head, "deferred", "asynchronous")
    with pytest.raises(AssertionError):
        assert_equal_to_composed_stages(family, run, profile, Layout((4, 4)), [[head], []], "eager")
