from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.sim.layout import Layout, Slot, can_hold, least_overshoot, squared_gaps, uniform_layout
from eeplan.spec import ExitRequest

splits = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple).filter(lambda split: sum(split) > 1)


def test_layers_of_an_uneven_split() -> None:
    layout = Layout((2, 3, 1))
    assert layout.num_stages == 3
    assert layout.num_layers == 6
    assert [layout.first_layer(stage) for stage in range(3)] == [1, 3, 6]
    assert [layout.last_layer(stage) for stage in range(3)] == [2, 5, 6]
    assert [layout.stage_of_layer(layer) for layer in range(1, 7)] == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("layer", [0, -1, 7])
def test_a_layer_outside_the_model_has_no_stage(layer: int) -> None:
    with pytest.raises(ValueError, match="layers 1 to 6"):
        Layout((2, 3, 1)).stage_of_layer(layer)


@pytest.mark.parametrize("split", [(), (2, 0)])
def test_a_stage_without_layers_is_refused(split: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="every stage needs a layer"):
        Layout(split)


def test_the_uniform_split_needs_divisible_layers() -> None:
    assert uniform_layout(8, 4) == Layout((2, 2, 2, 2))
    with pytest.raises(ValueError, match="do not split evenly"):
        uniform_layout(8, 3)


def test_one_hidden_state_can_be_read_on_two_stages() -> None:
    layout = uniform_layout(8, 2)
    end, start = ExitRequest(layer=4), ExitRequest(layer=5, boundary="before")
    assert end.depth == start.depth == 4
    assert (layout.stage_of(end), layout.stage_of(start)) == (0, 1)


def test_inside_a_stage_both_boundaries_are_the_same_place() -> None:
    layout = uniform_layout(8, 2)
    assert layout.stage_of(ExitRequest(layer=2)) == layout.stage_of(ExitRequest(layer=3, boundary="before"))
    assert layout.slots(0) == tuple(Slot(layer, 0, layer, "after") for layer in (1, 2, 3, 4))
    assert layout.slots(1) == (
        Slot(4, 1, 5, "before"),
        *(Slot(layer, 1, layer, "after") for layer in (5, 6, 7)),
    )


@settings(deadline=None)
@given(splits)
def test_slots_are_every_distinct_pair_of_depth_and_stage(split: tuple[int, ...]) -> None:
    layout = Layout(split)
    pairs = set()
    for layer, boundary in product(range(1, layout.num_layers + 1), ("before", "after")):
        request = ExitRequest(layer=layer, boundary=boundary)
        if 0 < request.depth < layout.num_layers:
            pairs.add((request.depth, layout.stage_of(request)))
    slots = [slot for stage in range(layout.num_stages) for slot in layout.slots(stage)]
    assert {(slot.depth, slot.stage) for slot in slots} == pairs
    assert len(slots) == len(pairs)
    for slot in slots:
        assert ExitRequest(layer=slot.layer, boundary=slot.boundary).depth == slot.depth


@settings(max_examples=60, deadline=None)
@given(splits, st.data())
def test_the_least_wasteful_slots_are_those_of_brute_force(
    split: tuple[int, ...], data: st.DataObject
) -> None:
    layout = Layout(split)
    counts = tuple(data.draw(st.integers(0, 2)) for _ in split)
    slots = [slot for stage in range(layout.num_stages) for slot in layout.slots(stage)]
    k, best = sum(counts), None
    for chosen in combinations(sorted(slots), k):
        depths = [slot.depth for slot in chosen]
        held = tuple(sum(slot.stage == stage for slot in chosen) for stage in range(layout.num_stages))
        if held == counts and len(set(depths)) == k:
            found = squared_gaps(depths, layout.num_layers), chosen
            best = found if best is None else min(best, found)
    assert least_overshoot(counts, layout) == best
    assert can_hold(counts, layout) == (best is not None)


def test_overshoot_is_the_mean_of_what_tokens_compute_in_vain() -> None:
    depths, num_layers, steps = (2, 3, 7), 10, 10_000
    needed = [(i + 0.5) * num_layers / steps for i in range(steps)]
    leaves = [min(mark for mark in (*depths, num_layers) if mark >= need) for need in needed]
    mean = sum(leave - need for leave, need in zip(leaves, needed, strict=True)) / steps
    assert squared_gaps(depths, num_layers) / (2 * num_layers) == pytest.approx(mean)
    assert squared_gaps((), 10) == 100


def test_exits_split_what_their_stages_let_them() -> None:
    """P=2, L=8: 4 and 6 on the last stage, 2 and 4 on the first."""
    layout = uniform_layout(8, 2)
    for counts, depths in (((0, 2), [4, 6]), ((2, 0), [2, 4]), ((1, 1), [2, 5])):
        found = least_overshoot(counts, layout)
        assert found is not None
        assert [slot.depth for slot in found[1]] == depths


def test_the_space_counts_both_boundaries() -> None:
    layout = uniform_layout(6, 2)
    pairs = [(layer, "after") for layer in range(1, 6)] + [(layer - 1, "before") for layer in range(2, 7)]
    sets = [c for c in combinations(pairs, 3) if len({depth for depth, _ in c}) == 3]
    assert layout.num_placements(3) == len(sets)
