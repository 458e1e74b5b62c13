"""Op costs for the way a run trains, and where they come from: measured, interpolated, or derived.

Sequence parallelism and recomputation change what an op keeps and what its backward does. Where the profile
was measured that way, its numbers are taken; otherwise they follow from those of the plain op and tensor
shapes, marked ``extrapolated``.
"""

from __future__ import annotations

from collections.abc import Iterator

from eeplan.profile import SECONDS, ModelShape, OpCost, OpName, OpProfile, Recompute, Way, timing_with
from eeplan.spec import RunSpec

DIVIDED_STATES: dict[OpName, int] = {
    "embedding": 1,
    "layer": 4,
    "exit_minimal": 0,
    "exit_norm": 1,
    "exit_mlp": 3,
    "exit_block": 5,
    "final_head": 1,
}
"""Tensors of the size of the hidden states that an op keeps whole without sequence parallelism, output
included: of a layer the outputs of two norms and two residual sums (Korthikanti et al. 2022, where dropout
masks and the inputs of both norms make it 10 bytes instead of 8)."""


def op_cost(profile: OpProfile, run: RunSpec, op: OpName) -> OpCost:
    """What ``op`` costs in ``run``.

    Raises:
        ProfileError: not measured, and nothing that it follows from.
    """
    size, parallel = run.training.micro_batch_size, run.parallel
    recompute = run.training.recompute_granularity if op == "layer" else None
    way = Way(parallel.tensor_model_parallel_size, parallel.sequence_parallel, recompute)
    for candidate in _simpler(way):
        sizes = profile.micro_batch_sizes(op, candidate)
        if sizes and sizes[0] <= size <= sizes[-1]:
            return _derived(profile.cost(op, size, candidate), way, profile.shape)
    return profile.cost(op, size, Way(parallel.tensor_model_parallel_size))


def _simpler(way: Way) -> Iterator[Way]:
    """Ways that costs of ``way`` can be told from, itself first."""
    yield way
    if way.recompute_granularity:
        yield way._replace(recompute_granularity=None)
    if way.sequence_parallel:
        yield from _simpler(way._replace(sequence_parallel=False))


def _derived(cost: OpCost, way: Way, shape: ModelShape) -> OpCost:
    if way.sequence_parallel and not cost.sequence_parallel:
        cost = _with_sequence_parallel(cost, shape)
    if way.recompute_granularity and not cost.recompute_granularity:
        cost = _with_recompute(cost, way.recompute_granularity, shape)
    return cost


def _with_sequence_parallel(cost: OpCost, shape: ModelShape) -> OpCost:
    """Each rank keeps its part of the sequence where it kept all of it.

    Times stay: an all-gather and a reduce-scatter move what the all-reduce did, and norms are short.
    """
    ranks = cost.tensor_model_parallel_size
    whole = min(DIVIDED_STATES[cost.op] * hidden_bytes(cost, shape), cost.kept_bytes)
    return cost.model_copy(
        update={
            "sequence_parallel": True,
            "kept_bytes": cost.kept_bytes - whole + whole // ranks,
            "extrapolated": True,
        }
    )


def _with_recompute(cost: OpCost, granularity: Recompute, shape: ModelShape) -> OpCost:
    """The backward first runs again what was not kept, so those bytes come alive in it as temporaries."""
    if granularity == "full":
        # The output stays: it is the next layer's input.
        share, dropped = 1.0, cost.kept_bytes - min(hidden_bytes(cost, shape), cost.kept_bytes)
        alive = cost.kept_bytes
    else:
        # Attention without stored scores keeps little beside its inputs, which stay: one fp32 number per head
        # and token. Its output, which the projection needs, is made a second time.
        share, heads = _attention_share(shape), shape.num_attention_heads
        tokens = shape.seq_length * cost.micro_batch_size
        dropped = min(4 * heads * tokens // cost.tensor_model_parallel_size, cost.kept_bytes)
        output = tokens * shape.hidden_size * element_bytes(shape) // cost.tensor_model_parallel_size
        alive = dropped + output
    again = (share * getattr(cost.forward, name) for name in SECONDS)
    backward = (sum(parts) for parts in zip(again, _seconds(cost), strict=True))
    # Forward: what is not kept may all be alive at once, as in a forward that keeps it.
    return cost.model_copy(
        update={
            "recompute_granularity": granularity,
            "backward": timing_with(cost.backward, backward),
            "kept_bytes": cost.kept_bytes - dropped,
            "forward_transient_bytes": cost.forward_transient_bytes + dropped,
            "backward_transient_bytes": alive
            + max(
                cost.forward_transient_bytes if granularity == "full" else 0, cost.backward_transient_bytes
            ),
            "extrapolated": True,
        }
    )


def _seconds(cost: OpCost) -> Iterator[float]:
    return (getattr(cost.backward, name) for name in SECONDS)


def _attention_share(shape: ModelShape) -> float:
    """Share of a layer's forward that its attention core multiplies, causal: half of 4 s h per token."""
    hidden, head_dim = shape.hidden_size, shape.hidden_size // shape.num_attention_heads
    matrices = (
        hidden * (2 * hidden + 2 * shape.num_query_groups * head_dim) + 3 * hidden * shape.ffn_hidden_size
    )
    core = 2 * shape.seq_length * hidden
    return core / (2 * matrices + core)


def hidden_bytes(cost: OpCost, shape: ModelShape) -> int:
    """Hidden states of one microbatch on one rank: s b h values, or its part of the sequence."""
    whole = shape.seq_length * cost.micro_batch_size * shape.hidden_size * element_bytes(shape)
    return whole // cost.tensor_model_parallel_size if cost.sequence_parallel else whole


def element_bytes(shape: ModelShape) -> int:
    """Bytes of one parameter or activation."""
    return 4 if shape.precision == "fp32" else 2
