"""What ops cost on a device: the profile file (profiles/*.yaml).

Only data and look-up: measuring is ``runtime.profiler``, composing stage costs is ``sim.costs``.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, PositiveInt, model_validator

from eeplan.errors import ProfileError
from eeplan.schema import Model, load_yaml
from eeplan.spec import Precision, RunSpec

OpName = Literal["embedding", "layer", "exit_minimal", "exit_norm", "exit_mlp", "exit_block", "final_head"]
"""``final_head`` is the final norm, the output matrix and the loss; every ``exit_*`` includes its loss."""

Recompute = Literal["full", "selective"]
"""What of a layer is computed again in its backward: all of it, or its attention core."""

Seconds = Annotated[float, Field(ge=0.0)]
Bytes = Annotated[int, Field(ge=0)]


class Timing(Model):
    """Distribution of ``n`` measured durations."""

    n: PositiveInt
    median_s: Seconds
    mean_s: Seconds
    """Mean of the middle half. Costs are composed from it: a stage's time is a sum of ops, and medians do not
    add up; the outer quarters are left out because they are mostly other work on the machine."""
    p10_s: Seconds
    p90_s: Seconds


class OpCost(Model):
    """One op at one microbatch size, as run inside a stage (its weights are not in cache).

    How it was run, beside the size, is its key: :attr:`way`.
    """

    op: OpName
    micro_batch_size: PositiveInt
    tensor_model_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False
    recompute_granularity: Recompute | None = None
    """Layers only: the backward also computes again what the forward did not keep."""
    forward: Timing
    backward: Timing
    kept_bytes: Bytes
    """New bytes alive after the forward, until the backward has run: saved tensors and the output."""
    forward_transient_bytes: Bytes
    """Largest live bytes during the forward beyond ``kept_bytes``."""
    backward_transient_bytes: Bytes
    """Largest live bytes during the backward beyond ``kept_bytes`` and the incoming gradient."""
    extrapolated: bool = False
    interpolated: bool = False
    """On the line between the two nearest measured microbatch sizes."""

    @property
    def way(self) -> Way:
        """How the op was run."""
        return Way(self.tensor_model_parallel_size, self.sequence_parallel, self.recompute_granularity)


class Way(NamedTuple):
    """How an op is run, whatever the size of the microbatch."""

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    recompute_granularity: Recompute | None = None

    def __str__(self) -> str:
        words = [f"tensor_model_parallel_size {self.tensor_model_parallel_size}"]
        words += ["sequence_parallel"] * self.sequence_parallel
        words += [f"recompute_granularity {self.recompute_granularity}"] * bool(self.recompute_granularity)
        return ", ".join(words)


PLAIN = Way()


class Transfer(Model):
    """Cost of moving bytes between two processes: ``latency_s + bytes / bandwidth_bytes_per_s``."""

    latency_s: Seconds
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0.0)]
    points: tuple[tuple[int, float], ...] = ()
    """(bytes, median seconds) pairs that the line was fitted to."""

    def seconds(self, size_bytes: int) -> float:
        """Predicted seconds for one message of ``size_bytes``."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


class OptimizerCost(Model):
    """Gradient clipping and optimizer step: ``fixed_s + parameters x per_parameter_s``."""

    fixed_s: Seconds
    per_parameter_s: Seconds
    transient_bytes_per_parameter: Annotated[float, Field(ge=0.0)] = 0.0
    state_bytes_per_parameter: Annotated[float, Field(gt=0.0)]
    """Parameters, gradients and optimizer state together (facts: 16 in fp32, 18 in bf16 with Adam)."""
    points: tuple[tuple[int, float], ...] = ()
    """(parameters, median seconds) pairs that the line was fitted to."""


class DecodeOpCost(Model):
    """One op of a decode step, run on ``rows`` positions at once, without gradients."""

    op: OpName
    """Heads end with the confidence of each sequence's last row instead of a loss, the final head with its
    token."""
    rows: PositiveInt
    sequences: PositiveInt = 1
    """That the rows belong to, each to as many; each attends to its own sequence."""
    time: Timing


class DecodeCosts(Model):
    """What decode steps cost on this device, by number of rows; whole matrices, no tensor parallelism."""

    processes: PositiveInt
    """Processes that decoded at once while measuring: 1, or the stages of a pipeline."""
    threads: PositiveInt
    """Compute threads per process."""
    context_tokens: PositiveInt
    """Positions that attention looked back at."""
    ops: tuple[DecodeOpCost, ...]
    step_overhead_s: Seconds = 0.0
    """Time per step outside the ops: the decode loop itself."""
    sequence_overhead_s: Seconds = 0.0
    """What each further sequence of a step adds to that."""
    check_overhead_s: Seconds = 0.0
    """What asking an exit adds to it, for each sequence."""

    @model_validator(mode="after")
    def _ops_are_unique(self) -> Self:
        keys = [(cost.op, cost.rows, cost.sequences) for cost in self.ops]
        for op, rows, sequences in keys:
            if keys.count((op, rows, sequences)) > 1:
                of = f" of {sequences} sequences" if sequences > 1 else ""
                raise ValueError(f"decode: '{op}' with {rows} rows{of} is given twice; keep one")
        return self


class DeviceFingerprint(Model):
    """Where the numbers were measured."""

    kind: Literal["cpu", "cuda"]
    name: str
    cores: PositiveInt
    memory_bytes: PositiveInt


class ModelShape(Model):
    """The part of a run that op costs depend on. Two runs with equal shapes can share a profile."""

    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt
    ffn_hidden_size: PositiveInt
    padded_vocab_size: PositiveInt
    seq_length: PositiveInt
    precision: Precision

    @classmethod
    def of(cls, run: RunSpec) -> ModelShape:
        """The shape that ``run`` needs a profile for."""
        return cls(
            hidden_size=run.model.hidden_size,
            num_attention_heads=run.model.num_attention_heads,
            num_query_groups=run.model.query_groups,
            ffn_hidden_size=run.model.ffn_size,
            padded_vocab_size=run.padded_vocab_size,
            seq_length=run.training.seq_length,
            precision=run.training.precision,
        )


class OpProfile(Model):
    """Measured op costs of one device and model shape."""

    schema_version: Literal[1]
    device: DeviceFingerprint
    software: dict[str, str]
    date: str
    threads: PositiveInt
    """Compute threads per process."""
    processes: PositiveInt
    """Processes that ran at once while measuring, so that contention for caches and memory is included."""
    shape: ModelShape
    ops: tuple[OpCost, ...]
    p2p: Transfer
    """A message between two processes of one node, or of any two where nodes are not told apart."""
    all_reduce: Transfer
    """All-reduce of a gradient between two such processes."""
    p2p_between_nodes: Transfer | None = None
    """A message between processes of two nodes, while the others of their nodes send theirs."""
    all_reduce_between_nodes: Transfer | None = None
    optimizer: OptimizerCost
    microbatch_overhead_s: Seconds = 0.0
    """Time per microbatch and stage outside the ops: batch fetch, launch, bookkeeping."""
    iteration_overhead_s: Seconds = 0.0
    """Time per iteration outside pipeline, synchronisation and optimizer: zeroing gradients, logging."""
    disturbed_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of op samples during which other work held the core. They were left out where enough others were
    taken; a large share still says that the machine was busy, and that a run on it may be slower."""
    process_base_bytes: Bytes = 0
    """Resident bytes of one process before any model exists: interpreter, libraries, communication."""
    decode: tuple[DecodeCosts, ...] = ()
    """One entry per number of processes that decode at once; empty when decoding was not measured."""

    @model_validator(mode="after")
    def _ops_are_unique(self) -> Self:
        keys = [(c.op, c.micro_batch_size, c.way) for c in self.ops]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(
                    f"ops: '{key[0]}' at micro_batch_size {key[1]} and {key[2]} is given twice; keep one"
                )
        return self

    def micro_batch_sizes(self, op: OpName, way: Way) -> list[int]:
        """Sizes at which ``op`` was measured that way, ascending."""
        return sorted(cost.micro_batch_size for cost in self.ops if cost.op == op and cost.way == way)

    def cost(self, op: OpName, micro_batch_size: int, way: Way = PLAIN) -> OpCost:
        """The cost of ``op``: measured, or on the line between its two nearest measured sizes, so marked.

        Raises:
            ProfileError: not measured that way, or at sizes all smaller or all larger; the message says what
                to profile.
        """
        measured = {c.micro_batch_size: c for c in self.ops if c.op == op and c.way == way}
        if micro_batch_size in measured:
            return measured[micro_batch_size]
        for low, high in pairwise(sorted(measured)):
            if low < micro_batch_size < high:
                return _between(measured[low], measured[high], micro_batch_size)
        have = f"measured there: micro_batch_size {sorted(measured)}" if measured else "it was not measured"
        sizes = ",".join(map(str, sorted({*measured, micro_batch_size})))
        raise ProfileError(
            f"profile has no '{op}' at micro_batch_size {micro_batch_size} and {way} ({have}); run `eeplan "
            f"profile --micro-batch-sizes {sizes}` on this run file"
        )

    def require_shape_of(self, run: RunSpec) -> None:
        """Refuse a profile of another model.

        Raises:
            ProfileError: names the first field that differs.
        """
        wanted = ModelShape.of(run)
        for field in ModelShape.model_fields:
            mine, theirs = getattr(self.shape, field), getattr(wanted, field)
            if mine != theirs:
                raise ProfileError(
                    f"profile is of another model: it was measured with {field} {mine}, the run file has "
                    f"{theirs}; run `eeplan profile` on this run file"
                )


def timing_with(timing: Timing, seconds: Iterable[float]) -> Timing:
    """``timing`` with other seconds: median, mean, tenth and ninetieth percentile."""
    return timing.model_copy(update=dict(zip(SECONDS, seconds, strict=True)))


SECONDS = ("median_s", "mean_s", "p10_s", "p90_s")
BYTES = ("kept_bytes", "forward_transient_bytes", "backward_transient_bytes")


def _between(one: OpCost, other: OpCost, size: int) -> OpCost:
    """Times and bytes affine in the microbatch size, through two measured ones."""
    weight = (size - one.micro_batch_size) / (other.micro_batch_size - one.micro_batch_size)

    def line(low: float, high: float) -> float:
        return low + weight * (high - low)

    def times(low: Timing, high: Timing) -> Timing:
        return timing_with(low, (line(getattr(low, name), getattr(high, name)) for name in SECONDS))

    return one.model_copy(
        update={
            "micro_batch_size": size,
            "forward": times(one.forward, other.forward),
            "backward": times(one.backward, other.backward),
            **{name: round(line(getattr(one, name), getattr(other, name))) for name in BYTES},
            "extrapolated": one.extrapolated or other.extrapolated,
            "interpolated": True,
        }
    )


def load_profile(path: Path) -> tuple[OpProfile, str]:
    """Read a profile.

    Returns:
        The profile and the SHA-256 of the file.

    Raises:
        FileError, SchemaError.
    """
    return load_yaml(path, OpProfile, "profile")
