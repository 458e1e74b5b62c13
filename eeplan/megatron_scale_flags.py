"""Megatron's flags for precision, recomputation, sharding and nodes: from a run, and back.

Megatron's messages between stages block unless stages are interleaved, and no flag says otherwise, so
``parallel.p2p_communication`` is not among them.
"""

from __future__ import annotations

from typing import Any

from eeplan.script_flags import FlagReader, Unread
from eeplan.spec import ParallelSpec, RunSpec

LOSS_SCALE: tuple[tuple[str, str, type[int] | type[float]], ...] = (
    ("--loss-scale", "loss_scale", float),
    ("--initial-loss-scale", "initial_loss_scale", float),
    ("--min-loss-scale", "min_loss_scale", float),
    ("--loss-scale-window", "loss_scale_window", int),
    ("--hysteresis", "hysteresis", int),
)
"""Flags and fields of ``training`` that matter with fp16 only; Megatron's defaults are a run file's."""

SWITCHES: tuple[tuple[str, str], ...] = (
    ("--sequence-parallel", "sequence_parallel"),
    ("--use-distributed-optimizer", "use_distributed_optimizer"),
    ("--overlap-grad-reduce", "overlap_grad_reduce"),
)
"""Flags without values and fields of ``parallel``."""

ONE_LAYER_AT_A_TIME = ("--recompute-method", "uniform", "--recompute-num-layers", "1")
"""How a whole layer is recomputed here, in Megatron's words."""


def scale_words(run: RunSpec) -> list[str]:
    """Flags of the training program."""
    training, parallel = run.training, run.parallel
    words = [flag for flag, field in SWITCHES if getattr(parallel, field)]
    if training.precision != "fp32":
        words.append(f"--{training.precision}")
    if training.precision == "fp16":
        for flag, field, _ in LOSS_SCALE:
            value = getattr(training, field)
            words += [flag, repr(value)] if value is not None else []
    if training.recompute_granularity is not None:
        words += ["--recompute-granularity", training.recompute_granularity]
    if training.recompute_granularity == "full":
        words += ONE_LAYER_AT_A_TIME
    return words


def launcher_words(parallel: ParallelSpec) -> tuple[str, ...]:
    """torchrun's flags: all ranks on one node, or full nodes."""
    per_node, nodes = parallel.gpus_per_node, parallel.num_nodes
    if per_node is None or nodes == 1 or parallel.world_size % per_node:
        return ("--nproc-per-node", str(parallel.world_size))
    return ("--nnodes", str(nodes), "--nproc-per-node", str(per_node))


def said_by_launcher(parallel: ParallelSpec) -> ParallelSpec:
    """``parallel`` as far as flags can say it."""
    nodes_are_said = "--nnodes" in launcher_words(parallel)
    return parallel.model_copy(
        update={
            "gpus_per_node": parallel.gpus_per_node if nodes_are_said else None,
            "p2p_communication": "asynchronous",
        }
    )


def read_scale(reader: FlagReader, document: dict[str, Any]) -> None:
    """Take these flags over into the sections ``training`` and ``parallel`` of a run document."""
    training, parallel = document["training"], document["parallel"]
    half, brain = reader.switch("--fp16"), reader.switch("--bf16")
    training["precision"] = "bf16" if brain else ("fp16" if half else "fp32")
    for flag, field, kind in LOSS_SCALE:
        value = reader.number(flag, kind)
        if value is not None:
            training[field] = value
    training["recompute_granularity"] = _recompute(reader)
    for flag, field in SWITCHES:
        parallel[field] = reader.switch(flag)
    # Megatron itself ignores it without tensor parallelism.
    parallel["sequence_parallel"] &= parallel["tensor_model_parallel_size"] > 1


def _recompute(reader: FlagReader) -> str | None:
    granularity = reader.one("--recompute-granularity")
    if reader.switch("--recompute-activations"):
        granularity = "selective"
    method, layers = reader.one("--recompute-method"), reader.number("--recompute-num-layers", int)
    modules = reader.take("--recompute-modules")
    if granularity not in (None, "full", "selective"):
        reader.unread.append(Unread("--recompute-granularity", (granularity,), "expected full or selective"))
        return None
    if granularity == "full" and (method == "block" or (layers or 1) > 1):
        said = (*((method,) if method else ()), *((str(layers),) if layers else ()))
        reader.unread.append(
            Unread(
                "--recompute-method", said, "some layers or several together; eeplan recomputes each layer"
            )
        )
    if granularity == "selective" and modules not in (None, ("core_attn",)):
        reader.unread.append(
            Unread("--recompute-modules", modules, "more than the attention core, which eeplan recomputes")
        )
    return granularity
