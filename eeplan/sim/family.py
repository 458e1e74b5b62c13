"""All candidates of one search as arrays: what a stage with n layers and some exits costs.

Times of a stage are sums over its ops, so they are linear in its layers; bytes, synchronisation and optimizer
step are tabulated for every number of layers. The tables equal ``costs.stage_costs`` and
``memory.iteration_peak_bytes`` (tested), which compose one stage at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eeplan.sim.bounds import in_flight_microbatches
from eeplan.sim.costs import (
    EXIT_OPS,
    CostModel,
    OpNumbers,
    Transport,
    link_messages_ns,
    shared_matrix_ns,
    to_ns,
)
from eeplan.sim.parameters import Head, holds_shared_matrix, layer_parameters, stage_parameters
from eeplan.sim.reductions import (
    data_sync_table_ns,
    state_bytes_per_parameter,
    step_ns,
    transient_bytes_per_parameter,
)
from eeplan.spec import ExitForward

Integers = NDArray[np.int64]


class Family(NamedTuple):
    """Candidates that differ in layers and exits per stage. Times in ns.

    The exits below a stage are numbered 0..c-1, those on it c..d-1; ``group[c, d]`` says which kind of stage
    that makes. Exits that are all alike make equal groups for equal d - c.
    """

    num_stages: int
    num_layers: int
    num_exits: int
    num_microbatches: int
    forward: Integers
    """[P] without layers and exits."""
    backward: Integers
    layer_forward: int
    layer_backward: int
    exit_forward: Integers
    """[k+1]: what the first c exits add to forwards, all together."""
    exit_backward: Integers
    message: Integers
    """[P-1] over each link."""
    rendezvous: bool
    blocks: bool
    """Rendezvous, and every stage has a steady phase, so that its messages can be counted as its work."""
    group: Integers
    """[k+1, k+1]"""
    exits_below: Integers
    """[L+1]: exits on the first N layers where exits have fixed places, else -1."""
    exits_most: Integers
    """[L+1]: the same with one at the end of a stage read there; equal where the layer is fixed, too."""
    excluded: Integers
    """[P]: exits per stage of candidates that do not count; -1 for none."""
    allowed: NDArray[np.bool_]
    """[P, L+1, groups]: n layers and these exits fit the memory limit."""
    peak: Integers
    """[P, L+1, groups] bytes."""
    sync: Integers
    """[P, L+1, groups] from a stage's last backward to its reduced gradients."""
    step: Integers
    """[P, L+1, groups] after all gradients are reduced."""
    holder: NDArray[np.bool_]
    """[P, groups]: takes part in the reduction of the shared matrix."""
    shared: Integers
    """[P+1]: time of that reduction over so many stages."""


def counted_family(
    model: CostModel, num_exits: int, head: Head, mode: ExitForward, transport: Transport
) -> Family:
    """Candidates with ``num_exits`` equal exits at any depth, in any split."""
    counts = np.arange(num_exits + 1)
    # Fewer exits than none is never asked for.
    group = np.maximum(counts[None, :] - counts[:, None], 0)
    anywhere = np.full(model.run.model.num_layers + 1, -1)
    groups = [(head,) * count for count in range(num_exits + 1)]
    return _family(model, groups, group, anywhere, (head,) * num_exits, mode, transport)


def iteration_ns(family: Family, ends_ns: Integers, layers: Integers, group: Integers) -> Integers:
    """Iterations of several candidates without the constant overhead, [n].

    Args:
        ends_ns: [n, P] of the stages' pipeline parts.
        layers: [n, P] of the stages.
        group: [n, P] kinds of the stages.
    """
    stages = np.arange(family.num_stages)
    ready = ends_ns + family.sync[stages, layers, group]
    holds = family.holder[stages, group]
    shared_ready = np.where(holds, ready, 0).max(axis=1, initial=0)
    # Every candidate has a holder: the last stage.
    synced = np.maximum(ready.max(axis=1, initial=0), shared_ready + family.shared[holds.sum(axis=1)])
    slowest: Integers = synced + family.step[stages, layers, group].max(axis=1, initial=0)
    return slowest


def at_depths(family: Family, depths: Sequence[int]) -> Family:
    """The candidates of a counted family whose exits read after so many layers, on either stage there."""
    layers = np.arange(family.num_layers + 1)[:, None]
    return family._replace(
        exits_below=(layers > np.array(depths)).sum(axis=1),
        exits_most=(layers >= np.array(depths)).sum(axis=1),
    )


def placed_family(
    model: CostModel, heads: Sequence[Head], layers: Sequence[int], mode: ExitForward, transport: Transport
) -> Family:
    """Candidates with exits at fixed places, in any split.

    Args:
        heads: of the exits, by depth.
        layers: that the exits name; each lives on the stage of its layer.
    """
    num_exits = len(heads)
    group = np.zeros((num_exits + 1, num_exits + 1), np.int64)
    groups: list[tuple[Head, ...]] = [()]
    for below in range(num_exits):
        for above in range(below + 1, num_exits + 1):
            group[below, above] = len(groups)
            groups.append(tuple(heads[below:above]))
    num_layers = model.run.model.num_layers
    below_layers = np.array([sum(layer <= count for layer in layers) for count in range(num_layers + 1)])
    return _family(model, groups, group, below_layers, heads, mode, transport)


def _family(
    model: CostModel,
    groups: Sequence[tuple[Head, ...]],
    group: Integers,
    exits_below: Integers,
    heads: Sequence[Head],
    mode: ExitForward,
    transport: Transport,
) -> Family:
    run, num_stages = model.run, model.run.parallel.pipeline_model_parallel_size
    layers = np.arange(run.model.num_layers + 1)
    columns = [
        [_columns(model, num_stages, stage, layers, heads, mode) for heads in groups]
        for stage in range(num_stages)
    ]

    def table(name: str) -> Integers:
        cells = [[getattr(cell, name) for cell in stage] for stage in columns]
        return np.ascontiguousarray(np.array(cells, np.int64).transpose(0, 2, 1))

    peak, limit = table("peak_bytes"), run.limits.device_memory_bytes
    ops = [model.ops[EXIT_OPS[head.kind]] for head in heads]
    eager = mode == "eager"
    fixed = [_fixed_ns(model, num_stages, stage) for stage in range(num_stages)]
    holder = [
        [holds_shared_matrix(run, num_stages, stage, heads) for heads in groups]
        for stage in range(num_stages)
    ]
    return Family(
        num_stages=num_stages,
        num_layers=run.model.num_layers,
        num_exits=len(heads),
        num_microbatches=run.num_microbatches,
        forward=np.array([forward for forward, _ in fixed], np.int64),
        backward=np.array([backward for _, backward in fixed], np.int64),
        layer_forward=model.ops["layer"].forward_ns,
        layer_backward=model.ops["layer"].backward_ns,
        exit_forward=_sums([op.forward_ns if eager else 0 for op in ops]),
        exit_backward=_sums([op.backward_ns + (0 if eager else op.forward_ns) for op in ops]),
        message=np.array(link_messages_ns(model, num_stages), np.int64),
        rendezvous=transport == "rendezvous",
        blocks=transport == "rendezvous" and run.num_microbatches > num_stages,
        group=group,
        exits_below=exits_below,
        exits_most=exits_below,
        excluded=np.full(num_stages, -1),
        allowed=np.ones(peak.shape, np.bool_) if limit is None else peak <= limit,
        peak=peak,
        sync=table("sync_ns"),
        step=table("step_ns"),
        holder=np.array(holder, np.bool_),
        shared=np.array([shared_matrix_ns(model, holders) for holders in range(num_stages + 1)], np.int64),
    )


def _sums(values: Sequence[int]) -> Integers:
    return np.concatenate([[0], np.cumsum(values, dtype=np.int64)]).astype(np.int64)


def _fixed_ns(model: CostModel, num_stages: int, stage: int) -> tuple[int, int]:
    """Forward and backward of a stage without layers and exits."""
    ops = [model.ops["embedding"]] if stage == 0 else []
    ops += [model.ops["final_head"]] if stage == num_stages - 1 else []
    overhead_ns = to_ns(model.profile.microbatch_overhead_s)
    return overhead_ns + sum(op.forward_ns for op in ops), sum(op.backward_ns for op in ops)


@dataclass(frozen=True, slots=True)
class _Columns:
    """One kind of stage for every number of layers [L+1]; entry 0 means nothing."""

    peak_bytes: Integers
    """Of the process, base included."""
    sync_ns: Integers
    step_ns: Integers


def _columns(
    model: CostModel,
    num_stages: int,
    stage: int,
    layers: Integers,
    heads: tuple[Head, ...],
    mode: ExitForward,
) -> _Columns:
    profile = model.profile
    without_layers = stage_parameters(model.run, num_stages, stage, 0, heads)
    parameters = without_layers + layers * layer_parameters(model.run)
    state = np.rint(parameters * state_bytes_per_parameter(model))
    step_peak = state + np.rint(parameters * transient_bytes_per_parameter(model))
    kept, transient = _activations(model, num_stages, stage, layers, heads, mode)
    in_flight = in_flight_microbatches(num_stages, model.run.num_microbatches, stage)
    peak = np.maximum(state + in_flight * kept + transient, step_peak) + profile.process_base_bytes
    sync_ns = data_sync_table_ns(model, stage, layers.tolist(), heads, mode)
    steps_ns = [step_ns(model, stage, count) for count in parameters.tolist()]
    return _Columns(
        peak_bytes=peak.astype(np.int64),
        sync_ns=np.array(sync_ns, np.int64),
        step_ns=np.array(steps_ns, np.int64),
    )


def _activations(
    model: CostModel,
    num_stages: int,
    stage: int,
    layers: Integers,
    heads: tuple[Head, ...],
    mode: ExitForward,
) -> tuple[Integers, Integers]:
    """Kept and largest transient bytes of one microbatch, as ``costs`` walks through them op by op.

    Bytes grow with every layer's forward and fall with every layer's backward, so only the last forward and
    the first two backwards of a layer can be the largest.
    """
    ops = [model.ops[EXIT_OPS[head.kind]] for head in heads]
    is_last, hidden = stage == num_stages - 1, model.hidden_bytes
    eager, deferred = (ops, []) if mode == "eager" else ([], ops)
    final = [model.ops["final_head"]] if is_last else []
    embedding = [model.ops["embedding"]] if stage == 0 else []
    layer = model.ops["layer"]
    kept = np.full(len(layers), 0 if stage == 0 else hidden)
    peak = kept.copy()

    def forward(op: OpNumbers, times: Integers | int = 1) -> None:
        nonlocal kept, peak
        kept = kept + times * op.kept_bytes
        peak = np.maximum(peak, kept + op.forward_transient_bytes)

    for op in embedding:
        forward(op)
    forward(layer, layers)
    for op in (*eager, *final):
        forward(op)
    # From here on relative to what the forward kept.
    forward_transient = peak - kept
    alive = largest = 0 if is_last else hidden
    for op in deferred:
        alive += op.kept_bytes
        largest = max(largest, alive + op.forward_transient_bytes)
    for op in reversed([*eager, *final, *deferred]):
        largest = max(largest, alive + op.backward_transient_bytes)
        alive += hidden - op.kept_bytes
    largest = max(largest, alive + layer.backward_transient_bytes)
    # The layers below the top one get a new gradient, and that of the final head is gone.
    alive += 0 if is_last else hidden
    second = alive - layer.kept_bytes + layer.backward_transient_bytes
    backward_transient = np.where(layers > 1, max(largest, second), largest)
    for op in embedding:
        last = alive - layers * layer.kept_bytes + op.backward_transient_bytes
        backward_transient = np.maximum(backward_transient, last)
    return kept, np.maximum(forward_transient, backward_transient)
