"""What an iteration's time is made of, and how it answers to each op of the model.

The critical path passes forwards, backwards and messages of stages (``critical_path``); this module takes the
stages apart into ops. An op belongs to a forward as often as the forward's time grows when the op's does, so
whatever ``costs`` composes is taken apart rightly, recomputed and deferred forwards included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eeplan.sim.costs import EXIT_OPS, CostModel, PipelineCosts
from eeplan.sim.critical_path import EventGraph, Place, Weights, critical_path, times_passed
from eeplan.timeline import Message

PASSES = ("forward", "backward")
_COLUMNS = ("forward_ns", "backward_ns", "turn_forward_ns", "turn_backward_ns", "bare_forward_ns")


@dataclass(frozen=True, slots=True)
class Passed:
    """How often critical paths pass something: what the iteration loses and gains in ns per ns."""

    least: int
    """What it gets shorter by when the thing takes a ns less."""
    most: int
    """What it gets longer by when the thing takes a ns more."""


@dataclass(frozen=True, slots=True)
class OpOnPath:
    """One op of the model, wherever it runs."""

    op: str
    """``embedding``, ``layer`` (all of them), ``exit_<depth>``, ``final_head``, ``message``."""
    forward: Passed
    backward: Passed
    critical_ns: int
    """Its part of one critical path."""


@dataclass(frozen=True, slots=True)
class StageOnPath:
    """The ops of one stage, and its messages to the next stage and back."""

    forward: Passed
    backward: Passed
    messages: Passed


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Of the pipeline part of one iteration."""

    ops: tuple[OpOnPath, ...]
    other_ns: int
    """Part of the same critical path that belongs to no op of the model: the executor's own time."""
    stages: tuple[StageOnPath, ...]


@dataclass(frozen=True, slots=True)
class ExitOp:
    """An early exit on its stage."""

    depth: int
    stage: int
    op: str
    """Its head's op in ``CostModel.ops``."""


def sensitivity(
    model: CostModel,
    compose: Callable[[CostModel], PipelineCosts],
    exits: Sequence[ExitOp],
    graph: EventGraph,
    stages: Sequence[int],
) -> Sensitivity:
    """Take the critical paths of ``graph`` apart.

    Args:
        model: run and op costs.
        compose: the simulated costs from a model with other op times.
        exits: of the plan, by depth.
        graph: of the simulated iteration.
        stages: whose ends the iteration hangs on (``deciding_stages``).
    """
    parts = _parts(model, compose, exits)
    num_stages = model.layout.num_stages
    weights = {place: _weights(place, parts, num_stages) for place in dict.fromkeys(graph.places)}
    least, most = times_passed(graph, stages, weights)
    passed = [Passed(*pair) for pair in zip(least.tolist(), most.tolist(), strict=True)]
    own_ns, other_ns = _times(model, exits, parts, graph, stages[0])
    names = [name for name, passed_in in parts if passed_in == "forward"]
    first, nothing = 3 * num_stages, Passed(0, 0)
    ops = [
        OpOnPath(name, passed[first + 2 * at], passed[first + 2 * at + 1], own_ns[name])
        for at, name in enumerate(names)
    ]
    if num_stages > 1:
        ops.append(OpOnPath("message", passed[-2], passed[-1], own_ns["message"]))
    return Sensitivity(
        ops=tuple(ops),
        other_ns=other_ns,
        stages=tuple(
            StageOnPath(
                passed[s],
                passed[num_stages + s],
                passed[2 * num_stages + s] if s + 1 < num_stages else nothing,
            )
            for s in range(num_stages)
        ),
    )


_Parts = Mapping[tuple[str, str], Mapping[str, tuple[int, ...]]]
"""(op, pass) to how often each stage's forward, backward, … contains it, by column of ``PipelineCosts``."""


def _parts(
    model: CostModel, compose: Callable[[CostModel], PipelineCosts], exits: Sequence[ExitOp]
) -> _Parts:
    base = compose(model)
    parts: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    depths_of: dict[str, list[ExitOp]] = {
        op: [one for one in exits if one.op == op] for op in EXIT_OPS.values() if op in model.ops
    }
    for op in (*(name for name in model.ops if name not in depths_of), *depths_of):
        for passed_in in PASSES:
            contained = _contained(model, compose, base, op, passed_in)
            if op not in depths_of:
                parts[op, passed_in] = contained
            for one in depths_of.get(op, ()):
                # Exits of a kind on one stage are all alike.
                alike = sum(other.stage == one.stage for other in depths_of[op])
                parts[f"exit_{one.depth}", passed_in] = {
                    column: tuple(n // alike * (s == one.stage) for s, n in enumerate(counts))
                    for column, counts in contained.items()
                }
    rest = [name for name, _ in parts if name not in ("embedding", "layer")]
    exits_first = sorted(dict.fromkeys(rest), key=lambda name: (not name.startswith("exit_"), name))
    depths = [f"exit_{one.depth}" for one in exits]
    order = ["embedding", "layer", *depths, *(name for name in exits_first if name not in depths)]
    return dict(sorted(parts.items(), key=lambda item: (order.index(item[0][0]), item[0][1] != "forward")))


def _contained(
    model: CostModel,
    compose: Callable[[CostModel], PipelineCosts],
    base: PipelineCosts,
    op: str,
    passed_in: str,
) -> dict[str, tuple[int, ...]]:
    """What each stage's time grows by when the op takes a ns more."""
    numbers = model.ops[op]
    longer = (
        replace(numbers, forward_ns=numbers.forward_ns + 1)
        if passed_in == "forward"
        else replace(numbers, backward_ns=numbers.backward_ns + 1)
    )
    changed = compose(replace(model, ops={**model.ops, op: longer}))
    return {
        column: tuple(
            after - before
            for before, after in zip(getattr(base, column), getattr(changed, column), strict=True)
        )
        for column in _COLUMNS
    }


def _weights(place: Place, parts: _Parts, num_stages: int) -> Weights:
    """Forwards, backwards and messages by stage; then each op's forward and backward; then messages."""
    own = np.zeros(3 * num_stages, np.int64)
    if place.what.startswith("message"):
        own[2 * num_stages + place.stage] = 1
        backward = place.what == "message_backward"
        return np.concatenate([own, np.zeros(len(parts), np.int64), [not backward, backward]])
    own[(num_stages if place.what.endswith("backward") else 0) + place.stage] = 1
    ops = [_count(contained, place) for contained in parts.values()]
    return np.concatenate([own, ops, [0, 0]]).astype(np.int64)


def _count(contained: Mapping[str, tuple[int, ...]], place: Place) -> int:
    counts = contained[f"{place.what}_ns"]
    return counts[place.stage] if counts else 0


def _times(
    model: CostModel, exits: Sequence[ExitOp], parts: _Parts, graph: EventGraph, stage: int
) -> tuple[dict[str, int], int]:
    """Nanoseconds of each op on one critical path, and what is left of it."""
    heads = {f"exit_{one.depth}": one.op for one in exits}
    own_ns = dict.fromkeys([*(name for name, _ in parts), "message"], 0)
    places = {id(node): place for node, place in zip(graph.nodes, graph.places, strict=True)}
    path = critical_path(graph, stage)
    total_ns = 0
    for node in path:
        if isinstance(node, Message):
            own_ns["message"] += node.receive_ns - node.send_ns
            total_ns += node.receive_ns - node.send_ns
            continue
        total_ns += node.end_ns - node.start_ns
        for (name, passed_in), contained in parts.items():
            numbers = model.ops[heads.get(name, name)]
            each_ns = numbers.forward_ns if passed_in == "forward" else numbers.backward_ns
            own_ns[name] += _count(contained, places[id(node)]) * each_ns
    return own_ns, total_ns - sum(own_ns.values())
