"""Measured runs of the Sailor project against predictions from their op times alone.

The file (see ``optables``) adds ``config`` and ``runs`` to a table of op times. Nothing measured on a whole
run enters a raw prediction: op times and bytes of single layers come from the file, the links from a data
sheet, the schedule and its blocking messages from the simulator. A calibrated prediction of a run uses the
measured times of its siblings, never its own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from eeplan.errors import SchemaError
from eeplan.optable_profile import Cluster, holds_scores, profile_from_table, score_bytes
from eeplan.optables import LayerTimes, OpTable, one_model_table, read_json
from eeplan.profile import Transfer
from eeplan.schema import Model, validate
from eeplan.sim.costs import (
    CostModel,
    OpNumbers,
    StageCosts,
    cost_model,
    grad_sync_ns,
    pipeline_costs,
    stage_costs,
    to_ns,
)
from eeplan.sim.engine import message_ns
from eeplan.sim.fast import ends_ns
from eeplan.sim.layout import layout_of
from eeplan.sim.memory import iteration_peak_bytes
from eeplan.sim.reductions import ring_all_reduce_s
from eeplan.spec import RunSpec
from eeplan.validate.errors import relative_error, summarize

NODE_LINK = Transfer(latency_s=20e-6, bandwidth_bytes_per_s=25e9)
"""One 200 Gb/s network port per GPU, as on the cluster of the published runs; latency typical of NCCL.

The four tensor-parallel ranks of a published run fill a node, so every message and reduction of gradients
crosses nodes: a line inside a node would carry none of them.
"""

KERNEL_LOADING_BYTES = 4_760_000_000
"""Device memory that the runs' software held outside its allocator on this platform, by the published planner
of the Sailor project (its constant for loading fused kernels)."""

MIN_MICROBATCHES = 4
"""Runs with fewer are mostly warm-up; a ratio does not carry over to or from them."""


class _Config(Model):
    model_config = ConfigDict(extra="ignore")

    hidden_size: PositiveInt
    sequence_length: PositiveInt
    num_layers: PositiveInt
    vocab_size: PositiveInt
    heads: PositiveInt


class MeasuredRun(Model):
    """One measured run of the file."""

    model_config = ConfigDict(extra="ignore")

    name: str
    pipeline_parallel: PositiveInt
    layers_per_stage: tuple[PositiveInt, ...]
    """Entries of the op table on each stage: the embedding counts on the first, the head on the last."""
    tensor_parallel: PositiveInt
    data_parallel: PositiveInt
    micro_batch_size: PositiveInt
    global_batch_size: PositiveInt
    measured_iteration_time_s: PositiveFloat
    measured_peak_memory_bytes: Annotated[int, Field(gt=0)]

    @property
    def num_microbatches(self) -> int:
        """Microbatches per iteration and data-parallel rank (M)."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)


class _File(Model):
    model_config = ConfigDict(extra="ignore")

    gpu: str = "unknown"
    config: _Config
    runs: Annotated[tuple[MeasuredRun, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one run."""

    run: MeasuredRun
    iteration_s: float
    compute_s: float
    """With free messages and no synchronisation: op times alone."""
    peak_bytes: int

    @property
    def time_error(self) -> float:
        """Signed, relative."""
        return relative_error(self.iteration_s, self.run.measured_iteration_time_s)

    @property
    def compute_error(self) -> float:
        """Signed, relative, of :attr:`compute_s`."""
        return relative_error(self.compute_s, self.run.measured_iteration_time_s)

    @property
    def memory_error(self) -> float:
        """Signed, relative."""
        return relative_error(self.peak_bytes, self.run.measured_peak_memory_bytes)


def validate_sailor(
    path: Path,
    link: Transfer = NODE_LINK,
    base_bytes: int = KERNEL_LOADING_BYTES,
    permutation_seed: int | None = None,
) -> dict[str, Any]:
    """Predict every run of the file and report errors.

    Args:
        path: JSON with ``config``, ``gpu``, ``op_times_s``, ``layer_memory_per_sequence_bytes``, ``runs``.
        link: between nodes, which are neighbours in the pipeline and in a data-parallel group.
        base_bytes: device memory outside the framework's allocator.
        permutation_seed: negative control: gives every size of the table the times of another one.

    Returns:
        ``{"raw": {"time", "memory"}, "calibrated": {"time"}, "op_times_only", "calibrated_with_links",
        "without_siblings", "runs", "constants", "data"}``; errors are fractions, negative when predicted too
        low.

    Raises:
        FileError, SchemaError: not such a file. ProfileError: a run needs op times that it lacks.
    """
    where = f"validation data {path}"
    document = read_json(path, "validation data")
    table = one_model_table(document, where)
    if permutation_seed is not None:
        table = _permuted(table, permutation_seed)
    file = validate(document, _File, where)
    predictions = [_predict(run, table, file, link, base_bytes, where) for run in file.runs]
    # A ratio of whole runs holds the network, too, so calibration starts from op times and assumes no link.
    calibrated = _leave_one_out([p.compute_s for p in predictions], file.runs)
    with_links = _leave_one_out([p.iteration_s for p in predictions], file.runs)
    return {
        "raw": {
            "time": summarize([p.time_error for p in predictions]).document(),
            "memory": summarize([p.memory_error for p in predictions]).document(),
        },
        "calibrated": {"time": summarize([*calibrated.values()]).document()},
        "op_times_only": {"time": summarize([p.compute_error for p in predictions]).document()},
        "calibrated_with_links": {"time": summarize([*with_links.values()]).document()},
        "without_siblings": [
            run.name for index, run in enumerate(file.runs) if _qualifies(run) and index not in calibrated
        ],
        "runs": [_row(p, calibrated.get(index)) for index, p in enumerate(predictions)],
        "constants": _constants(link, base_bytes),
        "data": table.source,
    }


def _predict(
    measured: MeasuredRun, table: OpTable, file: _File, link: Transfer, base_bytes: int, where: str
) -> Prediction:
    run = _run_of(measured, table, file, where)
    layout = layout_of(run)
    cluster = Cluster(
        device_name=file.gpu,
        device_memory_bytes=1,
        p2p=link,
        all_reduce=link,
        # One matrix of scores is allocated once and written by every layer.
        process_base_bytes=base_bytes + score_bytes(run) * holds_scores(table, run),
    )
    model = cost_model(run, profile_from_table(table, run, cluster, check_model=False), layout, ())
    stages = tuple(_stage(model, table, stage) for stage in range(layout.num_stages))
    costs = pipeline_costs(model, stages)
    times = np.array([costs.forward_ns]), np.array([costs.backward_ns])
    optimizer_s = max(stage.optimizer_ns for stage in stages) / 1e9

    blocking = ends_ns(*times, run.num_microbatches, message_ns(costs), "rendezvous")[0].tolist()
    synced_ns = max(blocking) + grad_sync_ns(blocking, stages, _tied_sync_ns(link, table, measured))
    free = ends_ns(*times, run.num_microbatches, (0,) * (layout.num_stages - 1))[0].tolist()
    return Prediction(
        run=measured,
        iteration_s=synced_ns / 1e9 + optimizer_s,
        compute_s=max(free) / 1e9 + optimizer_s,
        peak_bytes=max(iteration_peak_bytes(model, stages)) + model.profile.process_base_bytes,
    )


def _run_of(measured: MeasuredRun, table: OpTable, file: _File, where: str) -> RunSpec:
    """The run in eeplan's words; its gated MLP stands for any with as many parameters."""
    config, tp = file.config, measured.tensor_parallel
    entries = [*measured.layers_per_stage]
    if len(entries) != measured.pipeline_parallel or sum(entries) != table.num_layers + 2:
        raise SchemaError(
            f"{where}: run '{measured.name}' has layers_per_stage {entries}; expected "
            f"{measured.pipeline_parallel} numbers that sum to the op table's {table.num_layers + 2} entries"
        )
    entries[0] -= 1
    entries[-1] -= 1
    if min(entries) < 1:
        raise SchemaError(f"{where}: run '{measured.name}' has a stage without a transformer layer")
    document = {
        "schema_version": 1,
        "name": measured.name,
        "model": {
            "num_layers": table.num_layers,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.heads,
            "ffn_hidden_size": _equal_ffn(table, config, tp),
            "vocab_size": config.vocab_size,
        },
        "parallel": {
            "pipeline_model_parallel_size": measured.pipeline_parallel,
            "layer_split": entries,
            "tensor_model_parallel_size": tp,
            "data_parallel_size": measured.data_parallel,
        },
        "training": {
            "micro_batch_size": measured.micro_batch_size,
            "global_batch_size": measured.global_batch_size,
            "seq_length": config.sequence_length,
            "train_iters": 1,
        },
        "data": {"data_path": "none", "tokenizer": "none"},
    }
    return validate(document, RunSpec, f"{where}: run '{measured.name}'")


def _equal_ffn(table: OpTable, config: _Config, tp: int) -> int:
    """Inner width of a gated MLP with as many parameters as the table's layer has, a multiple of ``tp``."""
    hidden = config.hidden_size
    if tp not in table.bytes:
        return -(-8 * hidden // (3 * tp)) * tp
    parameters = table.bytes[tp][1].params_bytes // 4 * tp
    return max(1, round((parameters - 4 * hidden**2) / (3 * hidden * tp))) * tp


def _stage(model: CostModel, table: OpTable, stage: int) -> StageCosts:
    """One stage by the table's own entries on it, which need not all be alike."""
    costs = stage_costs(model, stage, (), "deferred")
    training, tp = model.run.training, model.run.parallel.tensor_model_parallel_size
    layout, optimizer = model.layout, model.profile.optimizer
    first = layout.first_layer(stage) if stage else 0
    stop = layout.last_layer(stage) + 1 + (stage == layout.num_stages - 1)
    if (training.micro_batch_size, tp) in table.times:
        rows = table.times[training.micro_batch_size, tp][first:stop]
        costs = replace(
            costs,
            forward_ns=to_ns(sum(row.forward_s for row in rows)),
            backward_ns=to_ns(sum(row.backward_s for row in rows)),
        )
    if tp not in table.bytes:
        return costs
    entries = table.bytes[tp][first:stop]
    # The received hidden states are kept as well.
    received = costs.kept_bytes - sum(op.kept_bytes for op in _trunk_ops(model, stage))
    parameters = sum(entry.params_bytes for entry in entries) // 4
    return replace(
        costs,
        kept_bytes=received + training.micro_batch_size * sum(entry.kept_bytes for entry in entries),
        parameters=parameters,
        state_bytes=round(parameters * optimizer.state_bytes_per_parameter),
        optimizer_ns=to_ns(parameters * optimizer.per_parameter_s),
        data_sync_ns=to_ns(
            ring_all_reduce_s(model.profile.all_reduce, 4 * parameters, model.run.parallel.data_parallel_size)
        ),
    )


def _trunk_ops(model: CostModel, stage: int) -> list[OpNumbers]:
    ops = [model.ops["layer"]] * model.layout.layers_per_stage[stage]
    ops += [model.ops["embedding"]] * (stage == 0)
    return ops + [model.ops["final_head"]] * (stage == model.layout.num_stages - 1)


def _tied_sync_ns(link: Transfer, table: OpTable, measured: MeasuredRun) -> int:
    """Embedding and head share one matrix, reduced over the first and the last stage."""
    tp = measured.tensor_parallel
    if measured.pipeline_parallel == 1 or tp not in table.bytes:
        return 0
    return to_ns(ring_all_reduce_s(link, table.bytes[tp][-1].params_bytes, 2))


def _leave_one_out(predicted_s: Sequence[float], runs: Sequence[MeasuredRun]) -> dict[int, float]:
    """Errors by index, after scaling each prediction by the mean ratio measured/predicted of its siblings.

    Siblings have the same number of stages and the same microbatch and tensor parallel size. Covered: at
    least two stages, at least :data:`MIN_MICROBATCHES` microbatches, at least one sibling.
    """
    ratios = {
        index: run.measured_iteration_time_s / predicted
        for index, (run, predicted) in enumerate(zip(runs, predicted_s, strict=True))
        if _qualifies(run)
    }
    errors = {}
    for index, ratio in ratios.items():
        siblings = [
            other_ratio
            for other, other_ratio in ratios.items()
            if other != index and _kin(runs[other]) == _kin(runs[index])
        ]
        if siblings:
            errors[index] = sum(siblings) / len(siblings) / ratio - 1.0
    return errors


def _qualifies(run: MeasuredRun) -> bool:
    return run.pipeline_parallel >= 2 and run.num_microbatches >= MIN_MICROBATCHES


def _kin(run: MeasuredRun) -> tuple[int, int, int]:
    return run.pipeline_parallel, run.micro_batch_size, run.tensor_parallel


def _permuted(table: OpTable, seed: int) -> OpTable:
    sizes = list(table.times)
    shuffled = sizes[1:] + sizes[:1]
    random.Random(seed).shuffle(shuffled)
    times: Mapping[tuple[int, int], tuple[LayerTimes, ...]] = {
        size: table.times[other] for size, other in zip(sizes, shuffled, strict=True)
    }
    return replace(table, times=times)


def _row(prediction: Prediction, calibrated_error: float | None) -> dict[str, Any]:
    run = prediction.run
    return {
        "name": run.name,
        "pipeline_parallel": run.pipeline_parallel,
        "data_parallel": run.data_parallel,
        "micro_batch_size": run.micro_batch_size,
        "num_microbatches": run.num_microbatches,
        "predicted_s": prediction.iteration_s,
        "measured_s": run.measured_iteration_time_s,
        "time_error": prediction.time_error,
        "calibrated_time_error": calibrated_error,
        "compute_only_s": prediction.compute_s,
        "compute_only_error": prediction.compute_error,
        "predicted_bytes": prediction.peak_bytes,
        "measured_bytes": run.measured_peak_memory_bytes,
        "memory_error": prediction.memory_error,
    }


def _constants(link: Transfer, base_bytes: int) -> list[dict[str, Any]]:
    rows = (
        ("link.bandwidth_bytes_per_s", link.bandwidth_bytes_per_s, "data sheet: one 200 Gb/s port per GPU"),
        ("link.latency_s", link.latency_s, "typical of NCCL between nodes"),
        ("transport", "rendezvous", "Megatron's blocking messages, in its default order"),
        ("state_bytes_per_parameter", 16, "fp32: parameter, gradient, Adam's two moments"),
        ("base_bytes", base_bytes, "published planner of the Sailor project, for this platform"),
        ("score_matrices", 3, "unfused attention: one buffer, and two gradients in the backward"),
        ("logit_temporary_bytes", 8, "fp32 copy of the logits and their gradient"),
    )
    return [{"name": name, "value": value, "source": source} for name, value, source in rows]
