"""Cases of training in many layouts, the oracle they are held against, and how to run them."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from builders import make_plan, run_document
from four_layers import four_layers
from oracles import reference_gpt as gpt
from parallel_worker import Outcome, Work, layout_of, run_case, text_of
from ranks import run_ranks

from eeplan.runtime.backend import Backend, start, stop
from eeplan.runtime.checkpoint_state import whole_state
from eeplan.runtime.model import build_model, whole_model_spec
from eeplan.schema import validate
from eeplan.spec import HEAD_KINDS, RunSpec

EXITS: dict[str, list[dict[str, Any]]] = {
    "0": [],
    "1": [{"layer": 3, "boundary": "before", "head": "mlp", "tied": False}],
    "2": [
        {"layer": 1, "boundary": "after", "head": "norm"},
        {"layer": 4, "boundary": "before", "head": "block"},
    ],
    "3": [
        {"layer": 1, "boundary": "after", "head": "minimal"},
        {"layer": 3, "boundary": "before", "head": "norm", "tied": False},
        {"layer": 3, "boundary": "after", "head": "mlp"},
    ],
}
"""By number of exits. Four layers on four stages: ``2`` reads on the first stage and on the last."""

for first, last in zip(HEAD_KINDS, (*HEAD_KINDS[1:], HEAD_KINDS[0]), strict=True):
    EXITS[f"{first}+{last}"] = [
        {"layer": 1, "boundary": "after", "head": first, "tied": first != "norm"},
        {"layer": 4, "boundary": "before", "head": last, "tied": last != "block"},
    ]

UNTIED = ("0", "1")
"""Without tied copies nor clipping, so that splitting layers changes the order of no sum."""


@dataclass(frozen=True, slots=True)
class Case:
    """A layout, exits, and options."""

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    exits: str = "0"
    sequence: bool = False
    distributed: bool = False
    overlap: bool = False
    exit_forward: str = "deferred"
    recompute: str | None = None
    dropout: float = 0.0
    precision: str = "fp32"
    clip_grad: float | None = None
    """None: 0.5, which clips, or with untied matrices 0, which does not."""
    fill: tuple[int, int] | None = None
    loss_scale: float | None = None
    overflow: tuple[int, int] | None = None
    """(rank, iteration) whose gradients are to hold an infinity."""
    sequences: int = 16
    """In an iteration, in microbatches of two."""
    stop_after: int | None = None
    """Steps to take of the run; None: all."""

    @property
    def world_size(self) -> int:
        return self.pipeline * self.tensor * self.data

    def document(self, steps: int) -> dict[str, Any]:
        untied = self.exits in UNTIED
        clip = self.clip_grad if self.clip_grad is not None else 0.0 if untied else 0.5
        policy = {"warmup": self.fill[0], "cooldown": self.fill[1]} if self.fill else "none"
        return run_document(
            model=four_layers(untied=untied) | {"init_method_std": 0.1},
            parallel={
                "pipeline_model_parallel_size": self.pipeline,
                "tensor_model_parallel_size": self.tensor,
                "data_parallel_size": self.data,
                "sequence_parallel": self.sequence,
                "use_distributed_optimizer": self.distributed,
                "overlap_grad_reduce": self.overlap,
            },
            training={
                "micro_batch_size": 2,
                "global_batch_size": self.sequences,
                "seq_length": 16,
                "train_iters": steps,
                "lr": 2e-3,
                "clip_grad": clip,
                "precision": self.precision,
                "recompute_granularity": self.recompute,
                "hidden_dropout": self.dropout,
                "attention_dropout": self.dropout,
                "loss_scale": self.loss_scale,
                "initial_loss_scale": 2.0**12,
                "hysteresis": 1,
            },
            exits={"layers": EXITS[self.exits], "exit_forward": self.exit_forward},
            fill={"policy": policy, "mode": "added"},
        )

    def run(self, steps: int, **training: float) -> RunSpec:
        document = self.document(steps)
        document["training"].update(training)
        return validate(document, RunSpec, "case")

    def work(self, steps: int, seeds: dict[tuple[str, str], str], **training: float) -> Work:
        """For the workers: this case, begun from the seed checkpoint of its exits."""
        plan = make_plan(self.run(steps, **training))
        return Work(plan, self.stop_after or steps, seeds[self.exits, self.precision], self.overflow)

    def label(self) -> str:
        """Short, for reports."""
        parts = [f"P{self.pipeline} T{self.tensor} D{self.data}", f"exits {self.exits}"]
        default = Case()
        for name in (
            "sequence",
            "distributed",
            "overlap",
            "exit_forward",
            "recompute",
            "dropout",
            "precision",
        ):
            value = getattr(self, name)
            if value != getattr(default, name):
                parts.append(name if value is True else f"{name} {value}")
        return ", ".join(parts)


def write_seeds(folder: Path, cases: Sequence[Case]) -> dict[tuple[str, str], str]:
    """A checkpoint of fresh parameters for every set of exits (and precision); one process writes them."""
    here, seeds = start(), dict[tuple[str, str], str]()
    try:
        for case in cases:
            key = (case.exits, case.precision)
            if key not in seeds:
                alone = Case(exits=case.exits, precision=case.precision)
                seeds[key] = _write_seed(folder / "-".join(key), alone, here)
    finally:
        stop()
    return seeds


def _write_seed(folder: Path, case: Case, here: Backend) -> str:
    plan = make_plan(case.run(1))
    model = build_model(plan.run, whole_model_spec(plan), here)
    dcp.save(whole_state(model, None), checkpoint_id=folder)
    return str(folder)


def run_on_ranks(cases: Sequence[Work], nproc: int) -> list[Outcome]:
    """All cases in one process group of ``nproc`` ranks; those of one layout after each other."""
    order = sorted(range(len(cases)), key=lambda i: layout_of(cases[i].plan))
    with tempfile.TemporaryDirectory() as folder:
        torch.save([cases[i] for i in order], Path(folder) / "cases.pt")
        run_ranks("parallel_worker", [Path(folder)], nproc=nproc)
        found = [Outcome(**one) for one in torch.load(Path(folder) / "out.pt")]
    return [outcome for _, outcome in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def run_here(cases: Sequence[Work]) -> list[Outcome]:
    """Cases of one process, in this one."""
    try:
        return [run_case(work) for work in cases]
    finally:
        stop()


def oracle(case: Case, steps: int, seed_checkpoint: str) -> list[dict[str, float]]:
    """Losses of every head by step, of a plain float64 model and torch's AdamW in one process.

    It shares with the runtime the seed's numbers and the text, and nothing that computes.
    """
    run = case.run(steps)
    exits, training = gpt.requested_exits(run), run.training
    shapes = gpt.parameter_shapes(run, exits)
    parameters = {
        name: value.double().requires_grad_() for name, value in _read(seed_checkpoint, shapes).items()
    }
    matrices = [p for p in parameters.values() if p.dim() > 1]
    norms = [p for p in parameters.values() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": training.weight_decay}, {"params": norms, "weight_decay": 0.0}],
        lr=training.lr,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_eps,
    )
    seen = []
    count = training.global_batch_size // training.micro_batch_size
    for iteration in range(1, steps + 1):
        data = text_of(run, iteration, count)
        microbatches = list(zip(data["tokens"], data["labels"], data["loss_mask"], strict=True))
        every = [gpt.losses(parameters, run, exits, *one) for one in microbatches]
        means = {name: torch.stack([losses[name] for losses in every]).mean() for name in every[0]}
        total = means["final"] + sum(e.effective_weight * means[f"exit_{e.depth}"] for e in exits)
        seen.append({name: float(mean.detach()) for name, mean in means.items()})
        for parameter, gradient in zip(
            parameters.values(), gpt.gradients(total, parameters).values(), strict=True
        ):
            parameter.grad = gradient
        _clip(list(parameters.values()), training.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * training.lr * (1.0 + math.cos(math.pi * (iteration - 1) / steps))
        optimizer.step()
    return seen


def _clip(parameters: list[torch.Tensor], limit: float) -> None:
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None))
    if limit and limit / (norm + 1e-6) < 1.0:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad *= limit / (norm + 1e-6)


def _read(folder: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = {name: torch.empty(shape) for name, shape in shapes.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def worst(outcome: Outcome, expected: list[dict[str, float]]) -> tuple[float, float]:
    """Largest relative difference of any head's loss in the first step, and in any step."""
    of_step = [
        max(abs(found[name] / wanted - 1) for name, wanted in one.items())
        for found, one in zip(outcome.losses, expected, strict=True)
    ]
    return of_step[0], max(of_step)
