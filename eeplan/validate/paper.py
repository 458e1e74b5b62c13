"""The ablation of EE-LLM's two placement optimizations, predicted from its standard rows.

Ten cells: two models, each without exits, with two exits placed naively, with Optimization 1 (exit forwards
deferred into the backward), with Optimization 2 (exits moved to the start of the next stage), and with both.
The rows without exits calibrate one efficiency per model, bytes kept per layer and a memory constant; the
eight rows with exits are then predicted by the planner's own costs, memory and simulator. Op times are
operation counts over that efficiency, or bytes over the device's bandwidth for what only moves memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from scipy.optimize import brentq

from eeplan.errors import SchemaError
from eeplan.optable_profile import LOGIT_TEMPORARY_BYTES, STATE_BYTES
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
from eeplan.schema import validate
from eeplan.sim.costs import cost_model, pipeline_costs, stage_costs
from eeplan.sim.engine import simulate
from eeplan.sim.layout import uniform_layout
from eeplan.sim.memory import iteration_peak_bytes
from eeplan.sim.parameters import Head
from eeplan.sim.schedule import one_f_one_b
from eeplan.spec import RunSpec
from eeplan.validate.ablation import (
    SETUPS,
    SHAPES,
    VOCABULARY,
    Ablation,
    AblationCluster,
    ModelName,
    Row,
    Setup,
    read_ablation,
)
from eeplan.validate.errors import relative_error, summarize

GIGABYTE = 1e9

MEMORY_BYTES_PER_S = 2.039e12
"""HBM of an A100 80 GB SXM, by its data sheet."""
NVLINK = Transfer(latency_s=10e-6, bandwidth_bytes_per_s=300e9)
"""NVLink 3 between the GPUs of a node, one direction."""
OPTIMIZER_BYTES_PER_PARAMETER = 34
"""Moved by clipping and Adam: reads gradient twice, moments, master copy; writes all but the gradient."""
EMBEDDING_FORWARD_BYTES = 12
"""Moved per value of the hidden states: looked up, transposed, dropped out, each a bf16 read and write."""
EMBEDDING_BACKWARD_BYTES = 12
"""Moved per parameter and microbatch: a bf16 gradient of the whole matrix is zeroed, then added in fp32."""
LOGIT_BYTES = 4
"""Kept per logit: the fp32 softmax."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the standard rows cannot give: their peak holds no logits, and their bottleneck no embedding."""

    logit_temporary_bytes: float = LOGIT_TEMPORARY_BYTES
    """Temporaries of a head per logit, beyond the softmax it keeps."""
    bandwidth_share: float = 0.6
    """Of the data sheet's bandwidth, reached by kernels that scatter or mix precisions."""


ALTERNATIVES = (
    Assumptions(logit_temporary_bytes=6),
    Assumptions(logit_temporary_bytes=11),
    Assumptions(bandwidth_share=0.4),
    Assumptions(bandwidth_share=0.9),
)
"""How much the outcome hangs on them."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the standard rows give."""

    flops_per_s: dict[ModelName, float]
    """Per model, so that its standard row's time is met."""
    layer_bytes_per_value: float
    """Kept by one layer per value of its hidden states (s b h), the same for both models."""
    constant_bytes: float
    """Context, buffers, fragmentation: the same for both models."""
    assumed: Assumptions


def validate_paper(path: Path | None = None, assumed: Assumptions | None = None) -> dict[str, Any]:
    """Predict the ablation's cells.

    Args:
        path: a table of the same form; None takes the published figures.
        assumed: other assumptions than the default.

    Returns:
        ``{"cells": [{"model", "setup", "predicted_s", "measured_s", "time_error", "predicted_gb",
        "measured_gb", "memory_error", "peak_stage"}, …], "time", "memory", "order", "constants",
        "sensitivity"}``; errors are fractions, negative when predicted too low. ``time`` and ``memory``
        summarise the rows with exits.

    Raises:
        FileError, SchemaError: not such a table.
    """
    table = read_ablation(path)
    calibration, cells = _predict_all(table, assumed or Assumptions())
    return {
        "cells": cells,
        **_summary(cells),
        "constants": _constants(calibration),
        "sensitivity": [
            {
                "logit_temporary_bytes": other.logit_temporary_bytes,
                "bandwidth_share": other.bandwidth_share,
                **_summary(_predict_all(table, other)[1]),
            }
            for other in ALTERNATIVES
        ],
    }


def _predict_all(table: Ablation, assumed: Assumptions) -> tuple[Calibration, list[dict[str, Any]]]:
    calibration = _calibrate(table, assumed)
    return calibration, [_cell(row, table.setup, calibration) for row in table.rows]


def _summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    with_exits = [cell for cell in cells if cell["setup"] != "standard"]
    return {
        "time": summarize([cell["time_error"] for cell in with_exits]).document(),
        "memory": summarize([cell["memory_error"] for cell in with_exits]).document(),
        "order": {name: _order([cell for cell in cells if cell["model"] == name]) for name in SHAPES},
    }


def _calibrate(table: Ablation, assumed: Assumptions) -> Calibration:
    standard = {row.model: row for row in table.rows if row.setup == "standard"}
    start = Calibration(dict.fromkeys(SHAPES, 1e14), 0.0, 0.0, assumed)

    def peak_bytes(model: ModelName, layer_bytes: float) -> float:
        return _predict(
            model, SETUPS["standard"], table.setup, replace(start, layer_bytes_per_value=layer_bytes)
        )[1]

    # The peak of the first stage is a line in the bytes per value; two rows, two unknowns.
    (one, first), (two, second) = (
        (peak_bytes(name, 100.0), standard[name].peak_memory_gb * GIGABYTE) for name in SHAPES
    )
    slopes = [peak_bytes(name, 101.0) - at for name, at in zip(SHAPES, (one, two), strict=True)]
    layer_bytes = 100.0 + ((second - two) - (first - one)) / (slopes[1] - slopes[0])
    constant = first - one - (layer_bytes - 100.0) * slopes[0]

    def seconds(model: ModelName, flops_per_s: float) -> float:
        return _predict(
            model, SETUPS["standard"], table.setup, replace(start, flops_per_s={model: flops_per_s})
        )[0]

    speeds = {name: _solve(partial(seconds, name), standard[name].iteration_time_s) for name in SHAPES}
    return Calibration(speeds, layer_bytes, constant, assumed)


def _solve(seconds: Callable[[float], float], target_s: float) -> float:
    """The speed at which an iteration takes ``target_s``; time rises with what one operation takes."""
    fastest, slowest = 1e-17, 1e-11
    if not seconds(1 / fastest) < target_s < seconds(1 / slowest):
        raise SchemaError(
            f"validation data: a standard row of {target_s:g} s per iteration; expected one of such models "
            "on GPUs, seconds to minutes"
        )
    per_operation = brentq(lambda one: seconds(1 / one) - target_s, fastest, slowest, xtol=1e-24, rtol=1e-12)
    return 1.0 / float(per_operation)


def _predict(
    model: ModelName, setup: Setup, cluster: AblationCluster, calibration: Calibration
) -> tuple[float, float, int]:
    """Seconds of an iteration, largest peak bytes of any device, and on which stage."""
    run = _run(model, cluster)
    layout = uniform_layout(run.model.num_layers, cluster.pipeline_parallel)
    costs_of = cost_model(run, _profile(run, model, calibration), layout, {"minimal"})
    heads = _heads_per_stage(run, setup)
    stages = tuple(
        stage_costs(costs_of, stage, heads[stage], setup.exit_forward) for stage in range(layout.num_stages)
    )
    costs = pipeline_costs(costs_of, stages)
    if setup.exit_forward == "deferred":
        # In the cool-down the reference system runs them before it waits for the gradient.
        exit_ns = costs_of.ops["exit_minimal"].forward_ns
        costs = replace(costs, before_gradient_ns=tuple(exit_ns * len(on_stage) for on_stage in heads))
    timeline = simulate(one_f_one_b(layout.num_stages, run.num_microbatches), costs)
    optimizer_ns = max(stage.optimizer_ns for stage in stages)
    peaks = iteration_peak_bytes(costs_of, stages)
    seconds = (timeline.pipeline_ns + optimizer_ns) / 1e9
    return seconds, max(peaks) + calibration.constant_bytes, peaks.index(max(peaks))


def _run(model: ModelName, cluster: AblationCluster) -> RunSpec:
    num_layers, hidden_size, heads = SHAPES[model]
    document = {
        "schema_version": 1,
        "name": model,
        "model": {
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "num_attention_heads": heads,
            "ffn_hidden_size": 8 * hidden_size // 3 // 64 * 64,
            "vocab_size": VOCABULARY,
            "untie_embeddings_and_output_weights": True,
        },
        "parallel": {"pipeline_model_parallel_size": cluster.pipeline_parallel},
        "training": {
            "micro_batch_size": cluster.micro_batch_size,
            "global_batch_size": cluster.global_batch_size,
            "seq_length": cluster.seq_length,
            "train_iters": 1,
            "precision": "bf16",
        },
        "data": {"data_path": "none", "tokenizer": "none"},
    }
    return validate(document, RunSpec, f"run of {model}")


def _heads_per_stage(run: RunSpec, setup: Setup) -> list[tuple[Head, ...]]:
    """Exits at a quarter and half of the depth: where the first two stages end and the next two begin."""
    layout = uniform_layout(run.model.num_layers, run.parallel.pipeline_model_parallel_size)
    heads: list[tuple[Head, ...]] = [()] * layout.num_stages
    if setup.boundary is not None:
        for depth in (run.model.num_layers // 4, run.model.num_layers // 2):
            layer = depth + (setup.boundary == "before")
            # An exit's matrix is its own: tied to the embedding, the first stage's memory would not grow as
            # the table says.
            heads[layout.stage_of_layer(layer)] += (Head("minimal", tied=False),)
    return heads


def _profile(run: RunSpec, model: ModelName, calibration: Calibration) -> OpProfile:
    shape, tokens = run.model, run.training.micro_batch_size * run.training.seq_length
    hidden, vocab = shape.hidden_size, run.padded_vocab_size
    # Causal attention looks back at half of the sequence on average.
    attention = 2 * run.training.seq_length * hidden
    layer_flops = tokens * (2 * (4 * hidden**2 + 3 * hidden * shape.ffn_size) + attention)
    speed = calibration.flops_per_s[model]
    layer_s, head_s = layer_flops / speed, 2 * tokens * hidden * vocab / speed
    bytes_per_s = calibration.assumed.bandwidth_share * MEMORY_BYTES_PER_S
    lookup_s = EMBEDDING_FORWARD_BYTES * tokens * hidden / bytes_per_s
    scatter_s = EMBEDDING_BACKWARD_BYTES * hidden * vocab / bytes_per_s
    logits = tokens * vocab
    # A stage with exits does not free the hidden states that it has sent.
    head_kept = LOGIT_BYTES * logits + 2 * tokens * hidden
    temporary = round(calibration.assumed.logit_temporary_bytes * logits)
    layer_kept = round(calibration.layer_bytes_per_value * tokens * hidden)
    ops = (
        _op("embedding", lookup_s, scatter_s, 0, 0, run),
        _op("layer", layer_s, 2 * layer_s, layer_kept, 0, run),
        _op("final_head", head_s, 2 * head_s, head_kept, temporary, run),
        _op("exit_minimal", head_s, 2 * head_s, head_kept, temporary, run),
    )
    return OpProfile(
        schema_version=1,
        device=DeviceFingerprint(kind="cuda", name="A100", cores=1, memory_bytes=80_000_000_000),
        software={"made": "from operation counts"},
        date="not measured",
        threads=1,
        processes=run.parallel.world_size,
        shape=ModelShape.of(run),
        ops=ops,
        p2p=NVLINK,
        all_reduce=NVLINK,
        optimizer=OptimizerCost(
            fixed_s=0.0,
            per_parameter_s=OPTIMIZER_BYTES_PER_PARAMETER / bytes_per_s,
            state_bytes_per_parameter=STATE_BYTES["bf16"],
        ),
    )


def _op(
    name: OpName, forward_s: float, backward_s: float, kept_bytes: int, transient_bytes: int, run: RunSpec
) -> OpCost:
    def timing(seconds: float) -> Timing:
        return Timing(n=1, median_s=seconds, mean_s=seconds, p10_s=seconds, p90_s=seconds)

    return OpCost(
        op=name,
        micro_batch_size=run.training.micro_batch_size,
        forward=timing(forward_s),
        backward=timing(backward_s),
        kept_bytes=kept_bytes,
        forward_transient_bytes=transient_bytes,
        backward_transient_bytes=transient_bytes,
        extrapolated=True,
    )


def _cell(row: Row, cluster: AblationCluster, calibration: Calibration) -> dict[str, Any]:
    seconds, peak_bytes, stage = _predict(row.model, SETUPS[row.setup], cluster, calibration)
    gigabytes = peak_bytes / GIGABYTE
    return {
        "model": row.model,
        "setup": row.setup,
        "predicted_s": seconds,
        "measured_s": row.iteration_time_s,
        "time_error": relative_error(seconds, row.iteration_time_s),
        "predicted_gb": gigabytes,
        "measured_gb": row.peak_memory_gb,
        "memory_error": relative_error(gigabytes, row.peak_memory_gb),
        "peak_stage": stage,
    }


def _order(cells: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Whether the setups that were measured apart are predicted in the same strict order."""
    return {
        quantity: all(
            one[f"predicted_{unit}"] < other[f"predicted_{unit}"]
            for one in cells
            for other in cells
            if one[f"measured_{unit}"] < other[f"measured_{unit}"]
        )
        for quantity, unit in (("time", "s"), ("memory", "gb"))
    }


def _constants(calibration: Calibration) -> list[dict[str, Any]]:
    standard = "calibrated: standard row of this model"
    both = "calibrated: the two standard rows, two unknowns"
    rows: list[tuple[str, float, str]] = [
        *((f"flops_per_s[{name}]", speed, standard) for name, speed in calibration.flops_per_s.items()),
        ("layer_bytes_per_value", calibration.layer_bytes_per_value, both),
        ("constant_bytes", calibration.constant_bytes, both),
        (
            "logit_temporary_bytes",
            calibration.assumed.logit_temporary_bytes,
            "assumed: fp32 copy of the logits and their fp32 gradient; see sensitivity",
        ),
        (
            "bandwidth_share",
            calibration.assumed.bandwidth_share,
            "assumed for kernels that scatter or mix precisions; see sensitivity",
        ),
        ("logit_bytes", LOGIT_BYTES, "tensor shapes: the fp32 softmax kept for the backward"),
        ("state_bytes_per_parameter", STATE_BYTES["bf16"], "bf16 with fp32 gradient, master copy and Adam"),
        ("backward_over_forward", 2, "operation counts"),
        ("memory_bytes_per_s", MEMORY_BYTES_PER_S, "data sheet of the A100 80 GB SXM"),
        (
            "embedding_forward_bytes",
            EMBEDDING_FORWARD_BYTES,
            "tensor shapes: three passes over hidden states",
        ),
        (
            "embedding_backward_bytes",
            EMBEDDING_BACKWARD_BYTES,
            "tensor shapes: dense gradient, fp32 addition",
        ),
        ("optimizer_bytes_per_parameter", OPTIMIZER_BYTES_PER_PARAMETER, "tensor shapes: clipping and Adam"),
        ("link.bandwidth_bytes_per_s", NVLINK.bandwidth_bytes_per_s, "data sheet: NVLink 3, one direction"),
        ("link.latency_s", NVLINK.latency_s, "typical of NCCL inside a node"),
        ("vocab_size", VOCABULARY, "the paper's models"),
    ]
    return [{"name": name, "value": value, "source": source} for name, value, source in rows]
