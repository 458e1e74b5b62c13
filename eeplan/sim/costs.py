"""From op costs to stage costs: what one microbatch takes on each stage, in time and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from eeplan.plan import Plan
from eeplan.profile import OpCost, OpName, OpProfile
from eeplan.profile_variants import op_cost
from eeplan.sim.layout import Layout
from eeplan.sim.links import message_transfer, require_links, shared_transfer
from eeplan.sim.parameters import Head, holds_shared_matrix, stage_parameters, vocabulary_parameters
from eeplan.sim.reductions import (
    GRADIENT_BYTES,
    data_sync_ns,
    optimizer_ranks,
    ring_all_reduce_s,
    state_bytes_per_parameter,
    step_ns,
    transient_bytes_per_parameter,
)
from eeplan.sim.units import EXIT_OPS as EXIT_OPS
from eeplan.sim.units import to_ns as to_ns
from eeplan.spec import ExitForward, HeadKind, RunSpec

Transport = Literal["asynchronous", "rendezvous"]
"""``asynchronous``: sends and receives return at once (isend, irecv posted ahead), and the op that uses a
message waits for it. ``rendezvous``: sender and receiver both wait until both have posted and the transfer is
done, as Megatron's blocking p2p does."""


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """All that the simulator needs to know about P stages. Tuples have one entry per stage."""

    forward_ns: tuple[int, ...]
    """One microbatch's forward; includes eager exit forwards."""
    backward_ns: tuple[int, ...]
    """One microbatch's backward; includes deferred exit forwards."""
    message_ns: tuple[int, ...] = ()
    """One message over each of the P-1 links, either way; empty: messages take no time."""
    output_bytes: tuple[int, ...] = ()
    """Message size from stage i to i+1 (and of its gradient back); last entry 0."""
    static_bytes: tuple[int, ...] = ()
    """Parameters, gradients, optimizer state."""
    kept_bytes: tuple[int, ...] = ()
    """Per microbatch, from the end of its forward to the end of its backward."""
    forward_transient_bytes: tuple[int, ...] = ()
    """Beyond ``kept_bytes``, while a forward runs."""
    backward_transient_bytes: tuple[int, ...] = ()
    """Beyond ``kept_bytes``, while a backward runs."""
    turn_forward_ns: tuple[int, ...] = ()
    """A warm-up insert's forward where it turns, up to the stage's last exit; empty: like any forward."""
    turn_backward_ns: tuple[int, ...] = ()
    """Its backward there; empty: like any backward."""
    turn_kept_bytes: tuple[int, ...] = ()
    """What it keeps there; empty: ``kept_bytes``."""
    bare_forward_ns: tuple[int, ...] = ()
    """A truncated microbatch's forward where its backward never comes, without exits, so never more than
    ``forward_ns``; empty: equal to it."""
    before_gradient_ns: tuple[int, ...] = ()
    """Start of a backward that awaits no gradient: deferred exit forwards, where the runtime lets them run
    while the gradient is on its way. Asynchronous messages only; empty: none."""
    transport: Transport = "asynchronous"
    """How all messages travel; the engine and the recurrences follow it."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages (P)."""
        return len(self.forward_ns)


@dataclass(frozen=True, slots=True)
class OpNumbers:
    """One op in the simulator's units; same meaning as the fields of ``profile.OpCost``."""

    forward_ns: int
    backward_ns: int
    kept_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """Everything that stage costs are composed from: a run, a layout, and the ops they need."""

    run: RunSpec
    layout: Layout
    profile: OpProfile
    ops: Mapping[str, OpNumbers]
    extrapolated_ops: tuple[str, ...]
    """Ops in use that were not measured as they are used."""
    interpolated_ops: tuple[str, ...]
    """Ops in use that were measured at smaller and larger microbatch sizes."""

    @property
    def hidden_bytes(self) -> int:
        """Hidden states of one microbatch on one rank: the message between stages.

        s b h values; a part of the sequence with sequence parallelism (facts 3; Korthikanti et al. 2022).
        """
        training, parallel = self.run.training, self.run.parallel
        tokens = training.seq_length * training.micro_batch_size
        whole = tokens * self.run.model.hidden_size * training.element_bytes
        return whole // parallel.tensor_model_parallel_size if parallel.sequence_parallel else whole


@dataclass(frozen=True, slots=True)
class StageCosts:
    """One stage with its exits: one microbatch in time and bytes, and the work once per iteration."""

    heads: tuple[Head, ...]
    forward_ns: int
    backward_ns: int
    exit_ns: int
    """The part of forward plus backward that the exits cost."""
    output_bytes: int
    kept_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int
    parameters: int
    state_bytes: int
    optimizer_ns: int
    """Step, and with the distributed optimizer the all-gather of parameters after it."""
    optimizer_transient_bytes: int
    data_sync_ns: int
    """From the last backward to gradients reduced over the data-parallel ranks of this stage."""
    holds_shared_matrix: bool


def cost_model(run: RunSpec, profile: OpProfile, layout: Layout, kinds: Iterable[HeadKind]) -> CostModel:
    """Look up the ops that ``run`` needs with exit heads of the given kinds.

    Raises:
        ProfileError: the profile is of another model, or lacks an op at the run's micro_batch_size and
            tensor_model_parallel_size, or lines between nodes that the run needs.
    """
    profile.require_shape_of(run)
    require_links(profile, run)
    names: list[OpName] = ["embedding", "layer", "final_head"]
    names += [EXIT_OPS[kind] for kind in sorted(set(kinds))]
    costs = {name: op_cost(profile, run, name) for name in names}
    numbers: dict[str, OpNumbers] = {name: _numbers(cost) for name, cost in costs.items()}
    extrapolated: tuple[str, ...] = tuple(name for name, cost in costs.items() if cost.extrapolated)
    if run.exits.distillation is not None and names[3:]:
        exits: dict[str, OpNumbers] = {
            name: distilled(numbers[name], numbers["final_head"]) for name in names[3:]
        }
        numbers, extrapolated = {**numbers, **exits}, (*extrapolated, "distillation")
    return CostModel(
        run=run,
        layout=layout,
        profile=profile,
        ops=numbers,
        extrapolated_ops=extrapolated,
        interpolated_ops=tuple(name for name, cost in costs.items() if cost.interpolated),
    )


def distilled(exit_: OpNumbers, final_head: OpNumbers) -> OpNumbers:
    """An exit that also learns from the final one: its forward computes the final exit's logits once more.

    They and the difference of the two distributions have the size of logits. Several exits of a stage share
    the teacher's logits, which are counted for each here; of the passes over logits that the divergence
    takes, only the final head's own are counted. So this is an estimate.
    """
    return replace(
        exit_,
        forward_ns=exit_.forward_ns + final_head.forward_ns,
        kept_bytes=exit_.kept_bytes + final_head.kept_bytes,
        forward_transient_bytes=exit_.forward_transient_bytes + final_head.kept_bytes,
    )


def stage_costs(
    model: CostModel, stage: int, heads: tuple[Head, ...], exit_forward: ExitForward
) -> StageCosts:
    """Compose one stage.

    Exits run after the stage's layers, in the order given (by depth), in both modes: at the end of the
    forward, before the final head (eager), or at the start of the backward (deferred; EE-LLM 3.2,
    Optimization 1). So neither time nor bytes depend on which layers of the stage they read.

    Args:
        stage: from 0.
        heads: the exits on this stage.
        exit_forward: for all of them.
    """
    exits = [model.ops[EXIT_OPS[head.kind]] for head in heads]
    trunk = _trunk(model, stage)
    eager, deferred = (exits, []) if exit_forward == "eager" else ([], exits)
    is_last = stage == model.layout.num_stages - 1
    # The final head closes the forward, so eager exits run before it.
    forward_ops = [*trunk[:-1], *eager, trunk[-1]] if is_last else [*trunk, *eager]
    layout = model.layout
    layers = layout.layers_per_stage[stage]
    parameters = stage_parameters(model.run, layout.num_stages, stage, layers, heads)
    kept_bytes, forward_transient = _forward_bytes(forward_ops, _input_bytes(model, stage))
    return StageCosts(
        heads=heads,
        forward_ns=to_ns(model.profile.microbatch_overhead_s) + sum(op.forward_ns for op in forward_ops),
        backward_ns=sum(op.backward_ns for op in (*trunk, *exits)) + sum(op.forward_ns for op in deferred),
        exit_ns=sum(op.forward_ns + op.backward_ns for op in exits),
        output_bytes=0 if is_last else model.hidden_bytes,
        kept_bytes=kept_bytes,
        forward_transient_bytes=forward_transient,
        backward_transient_bytes=_backward_transient_bytes(model, stage, eager, deferred),
        parameters=parameters,
        state_bytes=round(parameters * state_bytes_per_parameter(model)),
        optimizer_ns=step_ns(model, stage, parameters),
        optimizer_transient_bytes=round(parameters * transient_bytes_per_parameter(model)),
        data_sync_ns=data_sync_ns(model, stage, layers, heads, exit_forward),
        holds_shared_matrix=holds_shared_matrix(model.run, layout.num_stages, stage, heads),
    )


def pipeline_costs(model: CostModel, stages: Sequence[StageCosts]) -> PipelineCosts:
    """The simulator's view of all stages."""
    return PipelineCosts(
        forward_ns=tuple(stage.forward_ns for stage in stages),
        backward_ns=tuple(stage.backward_ns for stage in stages),
        message_ns=link_messages_ns(model, len(stages)),
        output_bytes=tuple(stage.output_bytes for stage in stages),
        static_bytes=tuple(stage.state_bytes for stage in stages),
        kept_bytes=tuple(stage.kept_bytes for stage in stages),
        forward_transient_bytes=tuple(stage.forward_transient_bytes for stage in stages),
        backward_transient_bytes=tuple(stage.backward_transient_bytes for stage in stages),
        transport=model.run.parallel.p2p_communication,
    )


def link_messages_ns(model: CostModel, num_stages: int) -> tuple[int, ...]:
    """One message of hidden states, or of their gradient, over each link between stages."""
    lines = (message_transfer(model.profile, model.run.parallel, stage) for stage in range(num_stages - 1))
    # Latency and transfer are rounded one by one, as the two parts of a message.
    size_bytes = model.hidden_bytes
    if model.run.exits.distillation is not None:
        # The teacher's hidden states go backward with the gradient: three in both directions together.
        size_bytes = size_bytes * 3 // 2
    return tuple(to_ns(line.latency_s) + to_ns(size_bytes / line.bandwidth_bytes_per_s) for line in lines)


def pipeline_costs_of(plan: Plan) -> PipelineCosts:
    """The same costs, rebuilt from a plan alone."""
    fill = plan.fill
    return PipelineCosts(
        forward_ns=tuple(to_ns(stage.forward_s) for stage in plan.stages),
        backward_ns=tuple(to_ns(stage.backward_s) for stage in plan.stages),
        message_ns=tuple(to_ns(stage.message_s) for stage in plan.stages[:-1]),
        output_bytes=tuple(stage.output_bytes for stage in plan.stages),
        static_bytes=tuple(stage.memory.state_bytes for stage in plan.stages),
        kept_bytes=tuple(stage.kept_bytes for stage in plan.stages),
        forward_transient_bytes=tuple(stage.forward_transient_bytes for stage in plan.stages),
        backward_transient_bytes=tuple(stage.backward_transient_bytes for stage in plan.stages),
        turn_forward_ns=tuple(map(to_ns, fill.turn_forward_s)) if fill else (),
        turn_backward_ns=tuple(map(to_ns, fill.turn_backward_s)) if fill else (),
        turn_kept_bytes=fill.turn_kept_bytes if fill else (),
        bare_forward_ns=tuple(map(to_ns, fill.bare_forward_s)) if fill else (),
        transport=plan.run.parallel.p2p_communication,
    )


def shared_matrix_sync_ns(model: CostModel, stages: Sequence[StageCosts]) -> int:
    """All-reduce of the shared vocabulary matrix's gradient over the stages that hold a copy (EE-LLM 3.1)."""
    return shared_matrix_ns(model, sum(stage.holds_shared_matrix for stage in stages))


def shared_matrix_ns(model: CostModel, holders: int) -> int:
    """The same from the number of stages that hold a copy."""
    # With the distributed optimizer each data-parallel rank has one share of the reduced gradient.
    size_bytes = GRADIENT_BYTES * vocabulary_parameters(model.run) // optimizer_ranks(model)
    line = shared_transfer(model.profile, model.run.parallel)
    return to_ns(ring_all_reduce_s(line, size_bytes, holders))


def grad_sync_ns(ends_ns: Sequence[int], stages: Sequence[StageCosts], shared_sync_ns: int) -> int:
    """Time that gradient synchronisation adds after the pipeline part.

    Each stage reduces over its data-parallel ranks as soon as its own last backward is done; the shared
    matrix waits for all stages that hold it.

    Args:
        ends_ns: end of each stage's last backward.
        shared_sync_ns: from :func:`shared_matrix_sync_ns`.
    """
    ready = [end + stage.data_sync_ns for end, stage in zip(ends_ns, stages, strict=True)]
    holders = [time for time, stage in zip(ready, stages, strict=True) if stage.holds_shared_matrix]
    shared_done = max(holders) + shared_sync_ns
    return max(*ready, shared_done) - max(ends_ns)


def _numbers(cost: OpCost) -> OpNumbers:
    return OpNumbers(
        forward_ns=to_ns(cost.forward.mean_s),
        backward_ns=to_ns(cost.backward.mean_s),
        kept_bytes=cost.kept_bytes,
        forward_transient_bytes=cost.forward_transient_bytes,
        backward_transient_bytes=cost.backward_transient_bytes,
    )


def _input_bytes(model: CostModel, stage: int) -> int:
    """The received hidden states, kept until the microbatch's backward is done."""
    return model.hidden_bytes if stage > 0 else 0


def _trunk(model: CostModel, stage: int) -> list[OpNumbers]:
    """Ops of the stage without exits, in forward order."""
    ops = [model.ops["layer"]] * model.layout.layers_per_stage[stage]
    if stage == 0:
        ops.insert(0, model.ops["embedding"])
    if stage == model.layout.num_stages - 1:
        ops.append(model.ops["final_head"])
    return ops


def _forward_bytes(ops: Sequence[OpNumbers], input_bytes: int) -> tuple[int, int]:
    """Bytes kept after the forward, and the most that is live beyond them while it runs."""
    kept = peak = input_bytes
    for op in ops:
        kept += op.kept_bytes
        peak = max(peak, kept + op.forward_transient_bytes)
    return kept, max(peak - kept, 0)


def _backward_transient_bytes(
    model: CostModel, stage: int, eager: Sequence[OpNumbers], deferred: Sequence[OpNumbers]
) -> int:
    """Most live bytes during the backward, beyond what the forward kept.

    Deferred exits run forward one after the other and all stay alive until the one backward call. Autograd
    then goes back through the losses, last one first, whose gradients wait for the layers they belong to,
    and through the layers. The gradient received from the next stage lives until the end. An exit's
    gradient is counted until all layers are done, whichever layer it reads: at most one message too much.
    """
    trunk = _trunk(model, stage)
    is_last = stage == model.layout.num_stages - 1
    layers, final = (trunk[:-1], [trunk[-1]]) if is_last else (trunk, [])
    received = 0 if is_last else model.hidden_bytes
    # Bytes relative to what the forward kept.
    alive = received
    peak = alive
    for op in deferred:
        alive += op.kept_bytes
        peak = max(peak, alive + op.forward_transient_bytes)
    for op in reversed([*eager, *final, *deferred]):
        peak = max(peak, alive + op.backward_transient_bytes)
        alive += model.hidden_bytes - op.kept_bytes
    for number, op in enumerate(reversed(layers)):
        # The top layer's incoming gradient is the received one or the final head's, counted already; the
        # others get a new one from the layer above.
        incoming = 0 if number == 0 else model.hidden_bytes
        if number == 1 and is_last:
            alive -= model.hidden_bytes
        peak = max(peak, alive + incoming + op.backward_transient_bytes)
        alive -= op.kept_bytes
    return max(peak, 0)
