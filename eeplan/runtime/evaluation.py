"""Evaluation during training: what every exit is worth on held-out text, however the model is split.

Every stage runs its layers and judges its own exits. Losses are means over all evaluated text. Agreement
with the final exit, calibration and usage need what every exit says about the same token, so each stage ships
three numbers per exit and token to rank 0, for at most :data:`MAX_TOKENS` tokens; ``decode.quality`` does the
rest, as it does for `eeplan evaluate`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from eeplan.files import write_text
from eeplan.plan import Plan
from eeplan.runtime.batches import BatchStream, Microbatch, build_batches
from eeplan.runtime.dataset_files import Part
from eeplan.runtime.decode.quality import (
    THRESHOLDS,
    Outcomes,
    exit_quality,
    joined,
    measured_usage,
    threshold_quality,
)
from eeplan.runtime.losses import Judgement, head_loss, judge_tokens
from eeplan.runtime.setup import Rank
from eeplan.runtime.stage import FINAL, Batch, exit_name
from eeplan.schema import write_yaml
from eeplan.usage import ExitUsage

MAX_TOKENS = 65_536
"""Most tokens that every exit is judged on, over all data-parallel ranks; losses are of all text."""
QUALITY, USAGE = "evaluation.json", "usage.yaml"
"""Files in the run folder; the second is what ``eeplan plan --usage`` reads."""
PART_NAMES: dict[Part, str] = {"train": "training", "valid": "validation", "test": "test"}


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation."""

    part: Part
    iteration: int
    losses: dict[str, float]
    """Mean loss of every head, as in training; on every rank."""
    outcomes: Outcomes | None
    """What every exit said about every judged token; on rank 0."""


class Evaluator:
    """Evaluates one part of the data, each time on the same text."""

    def __init__(self, rank: Rank, part: Part) -> None:
        self._rank = rank
        self._part = part
        self._stream: BatchStream | None = None
        run = rank.plan.run
        of_one = run.training.micro_batch_size * run.training.seq_length
        self._judged = max(1, MAX_TOKENS // (of_one * rank.backend.data_size))
        """Microbatches of each data-parallel rank whose tokens are judged."""

    def run(self, iteration: int) -> Evaluated:
        """Evaluate now; collective over all ranks."""
        if self._stream is None:
            self._stream = build_batches(self._rank.plan.run, rank_info=self._rank.backend, split=self._part)
        self._stream.seek(0)
        losses: dict[str, list[Tensor]] = {}
        judged: dict[str, list[Judgement]] = {}
        labels: list[Tensor] = []
        with evaluating(self._rank.model):
            for index, microbatch in enumerate(self._stream):
                batch = on_device(microbatch, self._rank.backend.device)
                judges = index < self._judged
                for name, logits in _heads(self._rank, index, batch):
                    if judges:
                        # Before the loss, which overwrites the logits.
                        found = judge_tokens(logits, batch.labels, self._rank.plan.run.model.vocab_size)
                        judged.setdefault(name, []).append(found)
                    loss = head_loss(
                        logits,
                        batch.labels,
                        batch.loss_mask,
                        temperature=temperature_of(self._rank.plan, name),
                    )
                    losses.setdefault(name, []).append(loss.reported)
                if judges:
                    labels.append(batch.labels)
        outcomes = _gathered(self._rank, {name: _columns(said) for name, said in judged.items()}, labels)
        return Evaluated(self._part, iteration, mean_losses(self._rank, losses), outcomes)


def evaluators(rank: Rank) -> dict[Part, Evaluator]:
    """Of the parts that hold something; validation during training, test at its end."""
    shares = dict(
        zip(("train", "valid", "test"), map(float, rank.plan.run.data.split.split(",")), strict=True)
    )
    parts: tuple[Part, ...] = ("valid", "test")
    return {part: Evaluator(rank, part) for part in parts if shares[part] > 0}


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Inside, ``model`` is in evaluation mode (no dropout, no recompute)."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def _heads(rank: Rank, index: int, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Logits [S, B, V] of every head of this stage by name; then the next stage gets what it awaits."""
    channels, model = rank.channels, rank.model
    if channels.previous_rank is None:
        hidden = model.embed(batch.tokens, batch.position_ids)
    else:
        hidden = torch.empty(channels.message_shape, dtype=channels.dtype, device=channels.device)
        dist.recv(hidden, src=channels.previous_rank, group=channels.forward_group, tag=index)
    depth, rotary = rank.stage.first_layer - 1, model.rotary(batch.tokens.shape[1])
    for exit_depth in sorted(exit_.depth for exit_ in rank.stage.exits):
        hidden = model.run_layers(hidden, rotary, depth, exit_depth)
        depth = exit_depth
        yield exit_name(exit_depth), model.exit_logits(exit_depth, hidden, rotary)
    hidden = model.run_layers(hidden, rotary, depth, rank.stage.last_layer)
    if channels.next_rank is None:
        yield FINAL, model.final_logits(hidden)
    else:
        dist.send(hidden.contiguous(), dst=channels.next_rank, group=channels.forward_group, tag=index)


def _columns(said: list[Judgement]) -> tuple[NDArray[Any], ...]:
    """Cross entropy, prediction and probability of all tokens [N], small."""
    return tuple(
        np.concatenate([getattr(one, name).flatten().cpu().numpy().astype(kind) for one in said])
        for name, kind in (
            ("cross_entropy", np.float32),
            ("predicted", np.int32),
            ("probability", np.float32),
        )
    )


def _gathered(
    rank: Rank, columns: Mapping[str, tuple[NDArray[Any], ...]], labels: list[Tensor]
) -> Outcomes | None:
    """Bring together what all stages and replicas said; None but on rank 0. Collective over all ranks."""
    backend = rank.backend
    mine: Any = None
    if backend.tensor_rank == 0:
        label_N = None
        if rank.stage.is_last:
            label_N = torch.cat([one.t().flatten() for one in labels]).cpu().numpy().astype(np.int32)
        mine = (backend.data_rank, dict(columns), label_N)
    gathered: list[Any] | None = [None] * backend.world_size if backend.rank == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    if gathered is None:
        return None
    replicas = []
    for data_rank in range(backend.data_size):
        parts = [part for part in gathered if part is not None and part[0] == data_rank]
        said = {name: columns for part in parts for name, columns in part[1].items()}
        (label_N,) = [part[2] for part in parts if part[2] is not None]
        entropy, predicted, probability = (
            np.stack([said[name][column] for name in head_names(rank.plan)]) for column in range(3)
        )
        shares = probability.astype(np.float64)
        replicas.append(
            Outcomes(
                entropy.astype(np.float64),
                predicted.astype(np.int64),
                shares,
                shares,
                label_N.astype(np.int64),
            )
        )
    return joined(replicas)


def mean_losses(rank: Rank, losses: Mapping[str, list[Tensor]]) -> dict[str, float]:
    """Mean of every head's losses, on every rank: of this stage's microbatches, over stages and replicas."""
    names = head_names(rank.plan)
    means = torch.zeros(len(names), dtype=torch.float64, device=rank.backend.device)
    for name, found in losses.items():
        means[names.index(name)] = torch.stack(found).double().mean()
    dist.all_reduce(means, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(means, group=parallel_state.get_data_parallel_group())
    return dict(zip(names, (means / rank.backend.data_size).tolist(), strict=True))


def write_quality(out: Path, plan: Plan, evaluated: Evaluated) -> dict[str, dict[str, float]]:
    """Write what exits are worth, and where there are any, the usage that the next plan is made from.

    Returns:
        By head: accuracy, agreement with the final exit, calibration error.
    """
    outcomes = evaluated.outcomes
    assert outcomes is not None, "only rank 0 writes"
    depths = [exit_.depth for exit_ in plan.exits]
    names = ", ".join(Path(one.path).name for one in plan.run.data.datasets)
    source = (
        f"iteration {evaluated.iteration} of run '{plan.run.name}' on the {PART_NAMES[evaluated.part]} part "
        f"of {names}; confidence max_probability"
    )
    exits = {name: exit_quality(outcomes, index) for index, name in enumerate(head_names(plan))}
    everywhere = (*depths, plan.run.model.num_layers)
    document = {
        "iteration": evaluated.iteration,
        "source": source,
        "num_tokens": outcomes.num_tokens,
        "losses": evaluated.losses,
        "exits": exits,
        "thresholds": [threshold_quality(outcomes, threshold, everywhere) for threshold in THRESHOLDS],
    }
    write_text(out / QUALITY, json.dumps(document, indent=1) + "\n")
    if depths:
        usage = measured_usage(outcomes, depths, plan.run.model.num_layers, source)
        write_yaml(out / USAGE, ExitUsage(schema_version=1, measured=usage), "Written by `eeplan train`.")
    kept = ("accuracy", "agreement_with_final", "calibration_error")
    return {name: {key: quality[key] for key in kept} for name, quality in exits.items()}


def head_names(plan: Plan) -> list[str]:
    """Names of all heads, from the first layer up."""
    return [exit_name(exit_.depth) for exit_ in plan.exits] + [FINAL]


def temperature_of(plan: Plan, name: str) -> float:
    """What divides a head's logits in its loss."""
    if name == FINAL:
        return 1.0
    return plan.run.exits.temperature_at(int(name.removeprefix("exit_")))


def on_device(microbatch: Microbatch, device: torch.device) -> Batch:
    """A microbatch where the model is."""
    return Batch(
        tokens=microbatch["tokens"].to(device),
        labels=microbatch["labels"].to(device),
        loss_mask=microbatch["loss_mask"].to(device),
        position_ids=microbatch["position_ids"].to(device),
    )
