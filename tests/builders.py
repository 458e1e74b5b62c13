"""Small valid inputs for tests: a run, a synthetic profile that fits it, and a plan made from both."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eeplan.plan import Plan
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
from eeplan.schema import validate, write_yaml
from eeplan.sim import planner
from eeplan.spec import RunSpec

RUN_DOCUMENT: dict[str, Any] = {
    "schema_version": 1,
    "name": "small",
    "model": {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256},
    "parallel": {"pipeline_model_parallel_size": 2},
    "training": {
        "micro_batch_size": 2,
        "global_batch_size": 16,
        "seq_length": 32,
        "train_iters": 4,
    },
    "data": {"data_path": "data/text", "tokenizer": "data/tokenizer.json"},
}


def run_document(**dotted_overrides: Any) -> dict[str, Any]:
    """The run file's content as plain dicts; ``model__num_layers=4`` sets ``model.num_layers``.

    Nothing is validated, so that tests can also build broken files. A section may be replaced whole
    (``exits={"count": 2}``).
    """
    document: dict[str, Any] = {
        key: dict(value) if isinstance(value, dict) else value for key, value in RUN_DOCUMENT.items()
    }
    for dotted, value in dotted_overrides.items():
        *parents, last = dotted.split("__")
        node = document
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return document


def make_run(**dotted_overrides: Any) -> RunSpec:
    """A valid run of 8 layers, 2 stages and 8 microbatches; overrides as in :func:`run_document`."""
    return validate(run_document(**dotted_overrides), RunSpec, "run")


def write_run(path: Path, run: RunSpec) -> Path:
    """Write ``run`` as a run file and return its path."""
    write_yaml(path, run)
    return path


def make_profile(
    run: RunSpec,
    *,
    seed: int = 0,
    jitter: float = 0.0,
    flops_per_s: float = 5e10,
    backward_ratio: float = 2.0,
    p2p_latency_s: float = 2e-5,
    p2p_bandwidth_bytes_per_s: float = 2e9,
    microbatch_overhead_s: float = 1e-5,
    iteration_overhead_s: float = 1e-4,
    process_base_bytes: int = 100 * 2**20,
    op_seconds: Mapping[str, tuple[float, float]] | None = None,
    op_bytes: Mapping[str, tuple[int, int, int]] | None = None,
    extrapolated: tuple[str, ...] = (),
) -> OpProfile:
    """A synthetic profile of the run's shape: seconds from operation counts, bytes from tensor shapes.

    Args:
        seed: of the random factors that ``jitter`` (a fraction) spreads the seconds and bytes by.
        op_seconds: (forward, backward) seconds for some ops, instead of the computed ones.
        op_bytes: (kept, forward transient, backward transient) for some ops.
        extrapolated: ops marked as not measured.
    """
    rng = random.Random(seed)
    micro_batch, tp = run.training.micro_batch_size, run.parallel.tensor_model_parallel_size
    ops = []
    for op, (flops, kept, transient) in _op_sizes(run).items():
        spread = 1.0 + jitter * rng.uniform(-1.0, 1.0)
        forward_s = 1e-6 + flops / flops_per_s * spread
        forward_s, backward_s = (op_seconds or {}).get(op, (forward_s, backward_ratio * forward_s))
        bytes_of_op = (round(kept * spread), round(transient * spread), round(2 * transient * spread))
        kept, forward_transient, backward_transient = (op_bytes or {}).get(op, bytes_of_op)
        ops.append(
            OpCost(
                op=op,
                micro_batch_size=micro_batch,
                tensor_model_parallel_size=tp,
                forward=_timing(forward_s),
                backward=_timing(backward_s),
                kept_bytes=kept,
                forward_transient_bytes=forward_transient,
                backward_transient_bytes=backward_transient,
                extrapolated=op in extrapolated,
            )
        )
    return OpProfile(
        schema_version=1,
        device=DeviceFingerprint(kind="cpu", name="synthetic", cores=2, memory_bytes=8 * 2**30),
        software={"python": "3.11"},
        date="2025-01-01",
        threads=1,
        processes=run.parallel.world_size,
        shape=ModelShape.of(run),
        ops=tuple(ops),
        p2p=Transfer(latency_s=p2p_latency_s, bandwidth_bytes_per_s=p2p_bandwidth_bytes_per_s),
        all_reduce=Transfer(latency_s=4e-5, bandwidth_bytes_per_s=1e9),
        optimizer=OptimizerCost(
            fixed_s=1e-4,
            per_parameter_s=1e-9,
            transient_bytes_per_parameter=4.0,
            state_bytes_per_parameter=16.0 if run.training.precision == "fp32" else 18.0,
        ),
        microbatch_overhead_s=microbatch_overhead_s,
        iteration_overhead_s=iteration_overhead_s,
        process_base_bytes=process_base_bytes,
    )


def make_plan(run: RunSpec, profile: OpProfile | None = None) -> Plan:
    """A plan of ``run`` by the planner itself, from a synthetic profile unless one is given."""
    return planner.make_plan(run, "0" * 64, profile or make_profile(run), "1" * 64)


def _op_sizes(run: RunSpec) -> dict[OpName, tuple[float, int, int]]:
    """(forward floating-point operations, kept bytes, transient bytes) of each op for one microbatch."""
    model = run.model
    hidden, ffn, vocab = model.hidden_size, model.ffn_size, run.padded_vocab_size
    tp = run.parallel.tensor_model_parallel_size
    tokens = run.training.micro_batch_size * run.training.seq_length
    width = 4 if run.training.precision == "fp32" else 2
    states, logits = tokens * hidden * width, tokens * vocab * 4 // tp
    kv_width = 2 * model.query_groups * model.head_dim
    mlp = 6.0 * tokens * hidden * ffn / tp
    attention = tokens * (4.0 * hidden * hidden + 2.0 * hidden * kv_width) / tp
    attention += 2.0 * tokens * run.training.seq_length * hidden / tp
    output = 2.0 * tokens * hidden * vocab / tp
    mlp_kept = 2 * states + 3 * tokens * ffn * width // tp
    layer_kept = mlp_kept + 3 * states + 4 * states // tp
    return {
        "embedding": (2.0 * tokens * hidden, states, states),
        "layer": (attention + mlp, layer_kept, 2 * states),
        "exit_minimal": (output, logits, logits),
        "exit_norm": (output + 8.0 * tokens * hidden, logits + states, logits),
        "exit_mlp": (output + mlp, logits + mlp_kept + states, logits),
        "exit_block": (output + mlp + attention, logits + layer_kept + states, logits),
        "final_head": (output + 8.0 * tokens * hidden, logits + states, logits),
    }


def _timing(seconds: float) -> Timing:
    return Timing(n=9, median_s=0.99 * seconds, mean_s=seconds, p10_s=0.95 * seconds, p90_s=1.1 * seconds)
