"""What ops cost on a device: the profile file (profiles/*.yaml).

Only data and look-up: measuring is ``runtime.profiler``, composing stage costs is ``sim.costs``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from eeplan.errors import ProfileError
from eeplan.schema import Model, load_yaml
from eeplan.spec import Precision, RunSpec

OpName = Literal["embedding", "layer", "exit_minimal", "exit_norm", "exit_mlp", "exit_block", "final_head"]
"""``final_head`` is the final norm, the output matrix and the loss; every ``exit_*`` includes its loss."""

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
    """One op at one microbatch size, as run inside a stage (its weights are not in cache)."""

    op: OpName
    micro_batch_size: PositiveInt
    tensor_model_parallel_size: PositiveInt = 1
    forward: Timing
    backward: Timing
    kept_bytes: Bytes
    """New bytes alive after the forward, until the backward has run: saved tensors and the output."""
    forward_transient_bytes: Bytes
    """Largest live bytes during the forward beyond ``kept_bytes``."""
    backward_transient_bytes: Bytes
    """Largest live bytes during the backward beyond ``kept_bytes`` and the incoming gradient."""
    extrapolated: bool = False


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
    """One op of a decode step, run on ``rows`` positions of one sequence at once, without gradients."""

    op: OpName
    """Heads end with the confidence of the last row instead of a loss, the final head with a token."""
    rows: PositiveInt
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

    @model_validator(mode="after")
    def _ops_are_unique(self) -> Self:
        keys = [(cost.op, cost.rows) for cost in self.ops]
        for op, rows in keys:
            if keys.count((op, rows)) > 1:
                raise ValueError(f"decode: '{op}' with {rows} rows is given twice; keep one")
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
    all_reduce: Transfer
    """All-reduce of a gradient between two processes, for tied matrices on several stages."""
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
        keys = [(c.op, c.micro_batch_size, c.tensor_model_parallel_size) for c in self.ops]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(
                    f"ops: '{key[0]}' at micro_batch_size {key[1]} and tensor_model_parallel_size {key[2]} "
                    "is given twice; keep one"
                )
        return self

    def cost(self, op: OpName, micro_batch_size: int, tensor_model_parallel_size: int = 1) -> OpCost:
        """The measured cost of ``op``.

        Raises:
            ProfileError: that op was not measured at that size; the message says what was.
        """
        measured = []
        for cost in self.ops:
            if cost.op == op and cost.tensor_model_parallel_size == tensor_model_parallel_size:
                if cost.micro_batch_size == micro_batch_size:
                    return cost
                measured.append(cost.micro_batch_size)
        have = f"measured there: micro_batch_size {sorted(measured)}" if measured else "it was not measured"
        raise ProfileError(
            f"profile has no '{op}' at micro_batch_size {micro_batch_size} and tensor_model_parallel_size "
            f"{tensor_model_parallel_size} ({have}); run `eeplan profile` on this run file"
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


def load_profile(path: Path) -> tuple[OpProfile, str]:
    """Read a profile.

    Returns:
        The profile and the SHA-256 of the file.

    Raises:
        FileError, SchemaError.
    """
    return load_yaml(path, OpProfile, "profile")
