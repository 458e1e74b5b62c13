"""Which layers and which exits live on which pipeline stage.

An exit lives with the layer that it names, whether it reads after or before it. So the hidden state between
the last layer of stage i and the first of stage i+1 can be read at the end of stage i or at the start of
stage i+1 (EE-LLM 3.2, Optimization 2: the later stage has one microbatch fewer in flight). Stages count from
0, layers from 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import comb
from typing import Protocol

from eeplan.spec import Boundary, RunSpec


class Position(Protocol):
    """Anything that says where an exit reads: a request of the run file, a placed exit, a slot."""

    @property
    def layer(self) -> int: ...
    @property
    def boundary(self) -> Boundary: ...
    @property
    def depth(self) -> int: ...


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One place where an exit can read. Slots of a stage differ in depth; neighbours share one depth."""

    depth: int
    """Layers computed before the exit."""
    stage: int
    layer: int
    boundary: Boundary


@dataclass(frozen=True, slots=True)
class Layout:
    """Layers of each pipeline stage, in order. Any split with at least one layer per stage is valid."""

    layers_per_stage: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.layers_per_stage or min(self.layers_per_stage) < 1:
            raise ValueError(f"every stage needs a layer; got {self.layers_per_stage}")

    @property
    def num_stages(self) -> int:
        """Pipeline stages (P)."""
        return len(self.layers_per_stage)

    @property
    def num_layers(self) -> int:
        """Layers of the whole model (L)."""
        return sum(self.layers_per_stage)

    def first_layer(self, stage: int) -> int:
        """Number of the stage's first layer."""
        return sum(self.layers_per_stage[:stage]) + 1

    def last_layer(self, stage: int) -> int:
        """Number of the stage's last layer."""
        return sum(self.layers_per_stage[: stage + 1])

    def stage_of_layer(self, layer: int) -> int:
        """Stage that runs ``layer``.

        Raises:
            ValueError: no such layer.
        """
        if layer >= 1:
            for stage, last in enumerate(accumulate(self.layers_per_stage)):
                if layer <= last:
                    return stage
        raise ValueError(f"layer {layer} is not among layers 1 to {self.num_layers}")

    def stage_of(self, position: Position) -> int:
        """Stage that runs an exit: the one that runs the layer it names, for both boundaries."""
        return self.stage_of_layer(position.layer)

    def slots(self, stage: int) -> tuple[Slot, ...]:
        """Where ``stage`` can read an exit, shallowest first, one slot per depth.

        ``before`` a layer inside the stage is the same as ``after`` the layer below it, and listed as that.
        The hidden state after all layers belongs to the final exit, the one before all layers to nobody.
        """
        first, last = self.first_layer(stage), self.last_layer(stage)
        start = [Slot(first - 1, stage, first, "before")] if stage > 0 else []
        stop = min(last, self.num_layers - 1)
        return (*start, *(Slot(layer, stage, layer, "after") for layer in range(first, stop + 1)))

    def num_placements(self, num_exits: int) -> int:
        """Sets of ``num_exits`` (layer, boundary) pairs with distinct depths: C(L-1, k) 2^k."""
        depths: int = comb(self.num_layers - 1, num_exits)
        return depths << num_exits


def layout_of(run: RunSpec) -> Layout:
    """The layer split that a run asks for; a nearly even one to start from if the planner is to choose."""
    split = run.parallel.layer_split
    if isinstance(split, tuple):
        return Layout(split)
    if split == "auto":
        return nearly_even_layout(run.model.num_layers, run.parallel.pipeline_model_parallel_size)
    return uniform_layout(run.model.num_layers, run.parallel.pipeline_model_parallel_size)


def nearly_even_layout(num_layers: int, num_stages: int) -> Layout:
    """Layers per stage that differ by one at most, the larger stages first."""
    size, larger = divmod(num_layers, num_stages)
    return Layout((size + 1,) * larger + (size,) * (num_stages - larger))


def uniform_layout(num_layers: int, num_stages: int) -> Layout:
    """Equal layers on every stage.

    Raises:
        ValueError: the stages do not divide the layers.
    """
    if num_layers % num_stages:
        raise ValueError(f"{num_layers} layers do not split evenly over {num_stages} stages")
    return Layout((num_layers // num_stages,) * num_stages)


def can_hold(counts: Sequence[int], layout: Layout) -> bool:
    """Whether so many exits fit on each stage with all depths distinct.

    Packing each stage's exits as shallow as possible leaves the most room, so it decides.
    """
    deepest = 0
    for stage, count in enumerate(counts):
        if count == 0:
            continue
        slots = layout.slots(stage)
        if not slots or max(slots[0].depth, deepest + 1) + count - 1 > slots[-1].depth:
            return False
        deepest = max(slots[0].depth, deepest + 1) + count - 1
    return True


def squared_gaps(depths: Iterable[int], num_layers: int) -> int:
    """Sum of the squared gaps between consecutive exits, with 0 and ``num_layers`` at the ends.

    A token that needs d layers leaves at the next exit. With d uniform over the model, the layers that it
    computes in vain are on average half of the gap it falls into: ``squared_gaps / (2 L)``.
    """
    marks = (0, *depths, num_layers)
    return sum((deeper - shallower) ** 2 for shallower, deeper in pairwise(marks))


def least_overshoot(counts: Sequence[int], layout: Layout) -> tuple[int, tuple[Slot, ...]] | None:
    """The slots whose exits waste the fewest layers, for a given number of exits on each stage.

    Dynamic programming over (exit, slot); depths increase strictly, so the hidden state between two stages is
    read on one side only.

    Returns:
        :func:`squared_gaps` and the slots by depth, the shallowest of equally good ones; None when a stage
        has too few slots.
    """
    wanted = [stage for stage, count in enumerate(counts) for _ in range(count)]
    # Least cost with the exits so far, the last of them in each slot in turn, and the slots that reach it.
    best: list[tuple[int, tuple[Slot, ...]]] = [(0, ())]
    for stage in wanted:
        reached: list[tuple[int, tuple[Slot, ...]]] = []
        for slot in layout.slots(stage):
            chains = [
                (cost + (slot.depth - depth) ** 2, (*chain, slot))
                for cost, chain in best
                if (depth := chain[-1].depth if chain else 0) < slot.depth
            ]
            reached += [min(chains)] if chains else []
        best = reached
    ends = [(cost + (layout.num_layers - (c[-1].depth if c else 0)) ** 2, c) for cost, c in best]
    return min(ends, default=None)
