"""An op profile from a per-layer op table: what was measured is taken over, the rest is derived and marked.

Taken from the table: times of embedding, layers and head; kept bytes where it has them. Derived:

- exit heads, which no table knows, from the output head and shares of a layer: ``extrapolated``;
- the run's microbatch size beyond all measured ones, on the line through the nearest two: ``extrapolated``
  (between them look-ups interpolate, and say so);
- kept bytes of a table without any, from tensor shapes: ``extrapolated``;
- temporaries, links, base memory: not part of any op's mark, so ``software["assumed"]`` names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from eeplan.errors import ProfileError
from eeplan.optables import LayerTimes, OpTable
from eeplan.profile import (
    DeviceFingerprint,
    ModelShape,
    OpCost,
    OpName,
    OpProfile,
    OptimizerCost,
    Timing,
    Transfer,
)
from eeplan.sim.parameters import layer_parameters, vocabulary_parameters
from eeplan.spec import Precision, RunSpec

PARAMETER_TOLERANCE = 0.03
"""Biases and position embeddings, which a run file's model lacks, stay below this; another model does not."""

HEAD_SHARE = 0.2
"""A head may run at another efficiency than a layer, but not at five times it."""

STATE_BYTES: dict[Precision, float] = {"fp32": 16.0, "bf16": 18.0, "fp16": 18.0}
"""Parameter, gradient, Adam's two moments, and with bf16 the fp32 master copy and gradient."""

LOGIT_TEMPORARY_BYTES = 8
"""Per logit, beyond what is kept: an fp32 copy of the logits, and their fp32 gradient."""

TORCH_EXTERNAL_BYTES = (2_000_000_000, 3_000_000_000)
"""Device memory outside the framework's allocator without and with tensor parallelism, as the planner of the
Sailor project assumes for its clusters: context, kernels, communication buffers."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a table of op times does not say about the machines."""

    device_name: str
    device_memory_bytes: int
    p2p: Transfer
    all_reduce: Transfer
    process_base_bytes: int | None = None
    """None takes :data:`TORCH_EXTERNAL_BYTES`."""
    between_nodes: Transfer | None = None
    """Line of messages and reductions between nodes; None where nodes are not told apart."""


@dataclass(frozen=True, slots=True)
class _Op:
    """Seconds over the layers it was measured on, bytes kept."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    kept_bytes: int
    derived: bool


def profile_from_table(
    table: OpTable,
    run: RunSpec,
    cluster: Cluster,
    date: str = "not stated",
    *,
    check_model: bool = True,
) -> OpProfile:
    """Make the profile that ``run`` needs, with every microbatch size the table has for its TP size.

    Args:
        table: of the run's model.
        run: gives the shape, the tensor parallel size and the microbatch size.
        cluster: links and memory.
        date: when the table was measured.
        check_model: refuse a table that seems to be of another model, or without an output head.

    Raises:
        ProfileError: the table has no such tensor parallel size, or is of another model.
    """
    tp = run.parallel.tensor_model_parallel_size
    measured = table.micro_batch_sizes(tp)
    if not measured:
        have = sorted({tp for _, tp in table.times})
        raise ProfileError(
            f"op table '{table.name}' has no tensor_model_parallel_size {tp}; it has {have}; "
            "change the run file"
        )
    if check_model:
        _require_same_model(table, run)
    wanted = run.training.micro_batch_size
    # Between measured sizes whoever looks up a cost interpolates.
    beyond = set() if measured[0] <= wanted <= measured[-1] else {wanted}
    ops: list[OpCost] = []
    for size in sorted({*measured, *beyond}):
        ops += _ops_of_size(table, run, size)
    base = cluster.process_base_bytes
    return OpProfile(
        schema_version=1,
        device=DeviceFingerprint(
            kind="cuda", name=cluster.device_name, cores=1, memory_bytes=cluster.device_memory_bytes
        ),
        software={
            "imported": f"op table {table.name}",
            "source": table.source or "not stated",
            "assumed": _assumptions(table, run, base),
        },
        date=date,
        threads=1,
        processes=1,
        shape=ModelShape.of(run),
        ops=tuple(ops),
        p2p=cluster.p2p,
        all_reduce=cluster.all_reduce,
        p2p_between_nodes=cluster.between_nodes,
        all_reduce_between_nodes=cluster.between_nodes,
        optimizer=_optimizer(table, run),
        process_base_bytes=TORCH_EXTERNAL_BYTES[tp > 1] if base is None else base,
    )


def score_bytes(run: RunSpec) -> int:
    """One matrix of attention scores of one microbatch on one rank, a s^2 b / t values."""
    training = run.training
    heads = run.model.num_attention_heads // run.parallel.tensor_model_parallel_size
    return heads * training.seq_length**2 * training.micro_batch_size * _width(run)


def holds_scores(table: OpTable, run: RunSpec) -> bool:
    """Whether a layer keeps a matrix of attention scores, which fused attention does not.

    It does when it keeps room for one beside the least that any layer keeps: inputs of its two norms and of
    its projections, 3 + 8/t values per value of the hidden states. With short sequences a fused layer may
    pass for one that does; the matrix is then small.
    """
    tp = run.parallel.tensor_model_parallel_size
    if tp not in table.bytes:
        return False
    least = (3 + 8 / tp) * _tokens(run) * run.model.hidden_size * _width(run)
    return table.bytes[tp][1].kept_bytes * run.training.micro_batch_size >= least + score_bytes(run)


def logits(run: RunSpec) -> int:
    """Logits of one microbatch on one rank, s b V / t values."""
    return _tokens(run) * run.padded_vocab_size // run.parallel.tensor_model_parallel_size


def _ops_of_size(table: OpTable, run: RunSpec, size: int) -> list[OpCost]:
    run = run.model_copy(update={"training": run.training.model_copy(update={"micro_batch_size": size})})
    embedding, layer, head = _measured_ops(table, run)
    mlp = _share(layer, _mlp_share(run))
    ops: dict[OpName, _Op] = {
        "embedding": embedding,
        "layer": layer,
        "final_head": head,
        # The output head has a norm as well, and that costs next to nothing beside the matrix.
        "exit_minimal": replace(head, derived=True),
        "exit_norm": replace(head, derived=True),
        "exit_mlp": _sum(head, mlp),
        "exit_block": _sum(head, layer),
    }
    return [_cost(name, op, run, holds_scores(table, run)) for name, op in ops.items()]


def _measured_ops(table: OpTable, run: RunSpec) -> tuple[_Op, _Op, _Op]:
    tp, size = run.parallel.tensor_model_parallel_size, run.training.micro_batch_size
    rows, interpolated = _rows(table, tp, size)
    bytes_known = tp in table.bytes
    kept = [entry.kept_bytes * size for entry in table.bytes[tp]] if bytes_known else _shape_bytes(run)
    derived = interpolated or not bytes_known

    def op(part: slice) -> _Op:
        # Every layer of a run costs the same here, so the mean over the layers' bytes keeps the sum.
        layers, bytes_kept = rows[part], kept[part]
        return _Op(
            forward_s=tuple(one.forward_s for one in layers),
            backward_s=tuple(one.backward_s for one in layers),
            kept_bytes=round(sum(bytes_kept) / len(bytes_kept)),
            derived=derived,
        )

    return op(slice(0, 1)), op(slice(1, -1)), op(slice(-1, None))


def _rows(table: OpTable, tp: int, size: int) -> tuple[tuple[LayerTimes, ...], bool]:
    """Times at a microbatch size; True when they lie on the line through the two nearest measured sizes."""
    measured = table.micro_batch_sizes(tp)
    if size in measured:
        return table.times[size, tp], False
    if len(measured) == 1:
        raise ProfileError(
            f"op table '{table.name}' has only micro_batch_size {measured[0]} for tensor_model_parallel_size "
            f"{tp}; a line to {size} needs two; change training.micro_batch_size"
        )
    low, high = min(pairwise(measured), key=lambda pair: _distance(size, pair))
    weight = (size - low) / (high - low)
    rows = zip(table.times[low, tp], table.times[high, tp], strict=True)
    return tuple(_between(one, other, weight) for one, other in rows), True


def _distance(size: int, pair: tuple[int, int]) -> int:
    low, high = pair
    return max(low - size, size - high, 0)


def _between(one: LayerTimes, other: LayerTimes, weight: float) -> LayerTimes:
    def line(low: float, high: float) -> float:
        return max(low + weight * (high - low), 0.0)

    return LayerTimes(
        line(one.forward_s, other.forward_s),
        line(one.backward_s, other.backward_s),
        line(one.update_s, other.update_s),
    )


def _sum(head: _Op, added: _Op) -> _Op:
    """An exit head of the output head and something before it."""
    return _Op(
        forward_s=(_mean(head.forward_s) + _mean(added.forward_s),),
        backward_s=(_mean(head.backward_s) + _mean(added.backward_s),),
        kept_bytes=head.kept_bytes + added.kept_bytes,
        derived=True,
    )


def _share(op: _Op, share: float) -> _Op:
    return _Op(
        forward_s=tuple(share * seconds for seconds in op.forward_s),
        backward_s=tuple(share * seconds for seconds in op.backward_s),
        kept_bytes=round(share * op.kept_bytes),
        derived=True,
    )


def _mlp_share(run: RunSpec) -> float:
    """Share of a layer's multiplications that its MLP does."""
    model, seq_length = run.model, run.training.seq_length
    key_value = 2 * model.query_groups * model.head_dim
    attention = model.hidden_size * (2 * model.hidden_size + key_value) + 2 * seq_length * model.hidden_size
    mlp = 3 * model.hidden_size * model.ffn_size
    return mlp / (mlp + attention)


def _cost(name: OpName, op: _Op, run: RunSpec, holds_scores: bool) -> OpCost:
    forward_transient, backward_transient = _temporaries(name, run, holds_scores)
    return OpCost(
        op=name,
        micro_batch_size=run.training.micro_batch_size,
        tensor_model_parallel_size=run.parallel.tensor_model_parallel_size,
        forward=_timing(op.forward_s),
        backward=_timing(op.backward_s),
        kept_bytes=op.kept_bytes,
        forward_transient_bytes=forward_transient,
        backward_transient_bytes=backward_transient,
        extrapolated=op.derived,
    )


def _temporaries(name: OpName, run: RunSpec, holds_scores: bool) -> tuple[int, int]:
    """Forward and backward bytes beyond what is kept, from shapes (see ``software["assumed"]``)."""
    if name == "embedding":
        return 0, 0
    inner = 3 * _tokens(run) * run.model.ffn_size // run.parallel.tensor_model_parallel_size * _width(run)
    scores = score_bytes(run) if holds_scores else 0
    layer = scores, max(2 * scores, inner)
    if name == "layer":
        return layer
    head = LOGIT_TEMPORARY_BYTES * logits(run)
    if name == "exit_block":
        return max(head, layer[0]), max(head, layer[1])
    return head, max(head, inner) if name == "exit_mlp" else head


def _timing(seconds: Sequence[float]) -> Timing:
    low, median, high = np.percentile(seconds, (10, 50, 90)).tolist()
    return Timing(n=len(seconds), median_s=median, mean_s=_mean(seconds), p10_s=low, p90_s=high)


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds)


def _shape_bytes(run: RunSpec) -> list[int]:
    """Kept bytes of embedding, one layer and head with fused attention (Korthikanti et al. 2022)."""
    tokens, tp, width = _tokens(run), run.parallel.tensor_model_parallel_size, _width(run)
    states = tokens * run.model.hidden_size * width
    layer = states * (10 + 24 / tp) / 2
    return [states, round(layer), 4 * logits(run) + states]


def _optimizer(table: OpTable, run: RunSpec) -> OptimizerCost:
    tp = run.parallel.tensor_model_parallel_size
    size = table.micro_batch_sizes(tp)[0]
    update_s = sum(row.update_s for row in table.times[size, tp])
    parameters = table.num_layers * layer_parameters(run) + 2 * vocabulary_parameters(run)
    if tp in table.bytes:
        parameters = sum(entry.params_bytes for entry in table.bytes[tp]) // 4
    return OptimizerCost(
        fixed_s=0.0,
        per_parameter_s=update_s / max(parameters, 1),
        state_bytes_per_parameter=STATE_BYTES[run.training.precision],
        points=((parameters, update_s),),
    )


def _require_same_model(table: OpTable, run: RunSpec) -> None:
    """Compare parameter counts, the only thing in a table that tells models apart.

    Raises:
        ProfileError: they differ by more than biases could explain.
    """
    tp = run.parallel.tensor_model_parallel_size
    if tp not in table.bytes:
        return
    model = run.model
    layer, head = table.bytes[tp][1].params_bytes // 4, table.bytes[tp][-1].params_bytes // 4
    mine = layer_parameters(run)
    if _differ(layer, mine):
        others = mine - 3 * model.hidden_size * model.ffn_size // tp
        fitting = (layer - others) * tp / (3 * model.hidden_size)
        raise ProfileError(
            f"op table '{table.name}' has layers of {layer} parameters per rank, the run file's have {mine}; "
            f"correct model.hidden_size, or set model.ffn_hidden_size near {fitting:.0f}"
        )
    # A head that shares the embedding's matrix may be listed without it.
    embedding, matrix = table.bytes[tp][0].params_bytes // 4, vocabulary_parameters(run)
    tied = head < PARAMETER_TOLERANCE * matrix
    if _differ(embedding if tied else head, matrix, 2 * PARAMETER_TOLERANCE):
        listed = embedding if tied else head
        raise ProfileError(
            f"op table '{table.name}' has a vocabulary matrix of {listed} parameters per rank, the run "
            f"file's has {matrix}; set model.vocab_size near {listed * tp // model.hidden_size}"
        )
    _require_matrix_in_head(table, run)


def _require_matrix_in_head(table: OpTable, run: RunSpec) -> None:
    """Refuse a table whose last entry is only a norm and a loss.

    Raises:
        ProfileError: the head takes far less time than its matrix must, next to a layer.
    """
    tp = run.parallel.tensor_model_parallel_size
    rows = table.times[table.micro_batch_sizes(tp)[-1], tp]
    attention = 2 * run.training.seq_length * run.model.hidden_size // tp
    expected = vocabulary_parameters(run) / (layer_parameters(run) + attention)
    found = rows[-1].forward_s / rows[1].forward_s if rows[1].forward_s else expected
    if found < HEAD_SHARE * expected:
        raise ProfileError(
            f"op table '{table.name}': its last entry takes {found:.2g} of a layer's forward time, and a "
            f"vocabulary matrix has {expected:.2g} of a layer's operations; it lacks the output head, which "
            "exits are made of"
        )


def _differ(one: int, other: int, tolerance: float = PARAMETER_TOLERANCE) -> bool:
    return abs(one - other) > tolerance * other


def _assumptions(table: OpTable, run: RunSpec, base: int | None) -> str:
    kept = (
        "from the table" if run.parallel.tensor_model_parallel_size in table.bytes else "from tensor shapes"
    )
    parts = [
        f"kept bytes {kept}",
        f"temporaries from tensor shapes ({LOGIT_TEMPORARY_BYTES} bytes per logit)",
        "links as given",
        "base memory as given" if base is not None else "base memory typical",
    ]
    return "; ".join(parts)


def _tokens(run: RunSpec) -> int:
    return run.training.seq_length * run.training.micro_batch_size


def _width(run: RunSpec) -> int:
    return run.training.element_bytes
