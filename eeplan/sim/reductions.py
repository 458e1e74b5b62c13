"""Gradients and parameters between data-parallel ranks: how long, and how much of it hides behind backwards.

Times are those of a ring from a line measured with two ranks (:class:`eeplan.profile.Transfer`): n ranks take
n-1 steps of size/n each to reduce-scatter, as many to all-gather, and both one after the other to all-reduce.

    plain                      all-reduce of all gradients after the last backward
    use_distributed_optimizer  reduce-scatter of gradients, a step over 1/d of the parameters, then an
                               all-gather of parameters in their own precision, which nothing hides
    overlap_grad_reduce        the reduction starts with the stage's last backward, one bucket per layer,
                               exit, head and embedding in backward order (Megatron-LM's DDP buckets), one
                               after the other; what is left when the backward ends is exposed

Compute is taken as not slowed by what runs behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eeplan.profile import Transfer
from eeplan.sim.links import data_transfer
from eeplan.sim.parameters import (
    Head,
    head_parameters,
    holds_shared_matrix,
    layer_parameters,
    stage_parameters,
    vocabulary_parameters,
)
from eeplan.sim.units import EXIT_OPS, to_ns
from eeplan.spec import ExitForward, Precision

if TYPE_CHECKING:
    from eeplan.sim.costs import CostModel

GRADIENT_BYTES = 4
"""Gradients are accumulated and reduced in fp32, whatever the parameters' precision."""
SHARDED_STATE_BYTES: dict[Precision, int] = {"fp32": 8, "bf16": 12, "fp16": 12}
"""Of one parameter, what the distributed optimizer divides: Adam's moments, and the fp32 master copy."""


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` equal ops of a backward, one after the other, each followed by its bucket's reduction."""

    backward_ns: int
    reduce_ns: int
    count: int = 1


def ring_all_reduce_s(pair: Transfer, size_bytes: int, ranks: int) -> float:
    """Seconds of an all-reduce over ``ranks`` from the line measured with two.

    A ring takes 2 (n-1) steps of size/n each; with two ranks that is the whole size in two steps.
    """
    if ranks < 2:
        return 0.0
    moved_bytes = size_bytes * 2 * (ranks - 1) / ranks
    return pair.latency_s * (ranks - 1) + moved_bytes / pair.bandwidth_bytes_per_s


def ring_half_s(pair: Transfer, size_bytes: int, ranks: int) -> float:
    """Seconds of a reduce-scatter or an all-gather of ``size_bytes`` in all: half of an all-reduce."""
    return ring_all_reduce_s(pair, size_bytes, ranks) / 2


def state_bytes_per_parameter(model: CostModel) -> float:
    """Parameters, gradients and optimizer state; distributed, 6 + 12/d in bf16 (facts 3)."""
    whole = model.profile.optimizer.state_bytes_per_parameter
    sharded = min(SHARDED_STATE_BYTES[model.run.training.precision], whole)
    return whole - sharded + sharded / optimizer_ranks(model)


def transient_bytes_per_parameter(model: CostModel) -> float:
    """Temporaries of the optimizer step."""
    return model.profile.optimizer.transient_bytes_per_parameter / optimizer_ranks(model)


def optimizer_ranks(model: CostModel) -> int:
    """Data-parallel ranks that divide one optimizer's work."""
    parallel = model.run.parallel
    return parallel.data_parallel_size if parallel.use_distributed_optimizer else 1


def step_ns(model: CostModel, stage: int, parameters: int) -> int:
    """Optimizer step of a stage, until every rank has all its parameters again."""
    optimizer, ranks = model.profile.optimizer, optimizer_ranks(model)
    line = data_transfer(model.profile, model.run.parallel, stage)
    gather_s = ring_half_s(line, parameters * model.run.training.element_bytes, ranks)
    return to_ns(optimizer.fixed_s + parameters / ranks * optimizer.per_parameter_s + gather_s)


def data_sync_ns(
    model: CostModel, stage: int, layers: int, heads: Sequence[Head], exit_forward: ExitForward
) -> int:
    """From the end of a stage's last backward to its gradients reduced over the data-parallel ranks.

    Args:
        layers: on the stage.
        heads: its exits, by depth.
    """
    return data_sync_table_ns(model, stage, (layers,), heads, exit_forward)[0]


def data_sync_table_ns(
    model: CostModel, stage: int, layers: Sequence[int], heads: Sequence[Head], exit_forward: ExitForward
) -> list[int]:
    """:func:`data_sync_ns` for several numbers of layers on the stage."""
    run, parallel = model.run, model.run.parallel
    if parallel.data_parallel_size == 1:
        return [0] * len(layers)
    if not parallel.overlap_grad_reduce:
        fixed = stage_parameters(run, parallel.pipeline_model_parallel_size, stage, 0, heads)
        return [reduce_ns(model, stage, fixed + count * layer_parameters(run)) for count in layers]
    before, layer, after = backward_runs(model, stage, heads, exit_forward)
    return [exposed_ns([*before, replace(layer, count=count), *after]) for count in layers]


def reduce_ns(model: CostModel, stage: int, parameters: int) -> int:
    """Reduction of so many gradients over the data-parallel ranks of a stage; nothing for none."""
    if not parameters:
        return 0
    ranks = model.run.parallel.data_parallel_size
    line, size_bytes = data_transfer(model.profile, model.run.parallel, stage), GRADIENT_BYTES * parameters
    seconds = ring_half_s if model.run.parallel.use_distributed_optimizer else ring_all_reduce_s
    return to_ns(seconds(line, size_bytes, ranks))


def exposed_ns(runs: Sequence[Run]) -> int:
    """What is left of the reductions when the backward ends.

    A bucket is ready when its op is done, and starts when the one before it is done as well. Over a run of
    equal ops that wait is longest for the first or the last of them, so no loop over layers is needed.
    """
    clock = done = 0
    for run in runs:
        if run.count:
            first, last = clock + run.backward_ns, clock + run.count * run.backward_ns
            done = max(max(done, first) + run.count * run.reduce_ns, last + run.reduce_ns)
            clock = last
    return max(done - clock, 0)


def backward_runs(
    model: CostModel, stage: int, heads: Sequence[Head], exit_forward: ExitForward
) -> tuple[list[Run], Run, list[Run]]:
    """The backward of a stage in its order (see ``costs``): losses from the last one on, a layer, embedding.

    The stage's copy of the shared matrix is complete when the last op that uses it is done.
    """
    run, stages = model.run, model.run.parallel.pipeline_model_parallel_size
    matrix = vocabulary_parameters(run)
    exits = [(EXIT_OPS[head.kind], head_parameters(run, head), head.tied) for head in heads]
    final = [("final_head", run.model.hidden_size, True)] if stage == stages - 1 else []
    embedding_is_shared = stage == 0 and not run.model.untie_embeddings_and_output_weights
    copy = 0 if embedding_is_shared or not holds_shared_matrix(run, stages, stage, heads) else matrix
    is_eager = exit_forward == "eager"
    order = [*reversed([*exits, *final] if is_eager else [*final, *exits])]
    last_user = max((index for index, (_, _, tied) in enumerate(order) if tied), default=None)

    def one(name: str, parameters: int) -> Run:
        return Run(model.ops[name].backward_ns, reduce_ns(model, stage, parameters))

    # Deferred exit forwards come first; no gradient is ready after them.
    before = [Run(0 if is_eager else sum(model.ops[name].forward_ns for name, _, _ in exits), 0)]
    before += [one(name, own + copy * (index == last_user)) for index, (name, own, _) in enumerate(order)]
    return before, one("layer", layer_parameters(run)), [one("embedding", matrix)] if stage == 0 else []
