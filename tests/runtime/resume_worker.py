"""The ranks of test_resume: runs without interruption, and runs that go on from each checkpoint of it.

``main`` gets the plan, a folder for checkpoints, and OUT: rank r writes ``OUT.r.json``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import forget_layout

from eeplan.plan import Plan, load_plan
from eeplan.runtime import loop, resume
from eeplan.runtime.backend import stop
from eeplan.runtime.batches import BatchStream, build_batches
from eeplan.runtime.checkpoint_state import named_state, random_state
from eeplan.runtime.setup import Rank, set_up

DROPOUT = 0.1
"""Put between layers, so that the random generators matter."""
WHOLE_WAY = (6,)
"""Resumed from here, the run goes on to its end."""


@dataclass
class Run:
    """A rank in training."""

    rank: Rank
    stream: BatchStream

    @classmethod
    def begin(cls, plan: Plan) -> Run:
        forget_layout()
        rank = set_up(plan)
        torch.manual_seed(plan.run.training.seed + rank.backend.rank)
        for layer in rank.model.decoder.layers:
            layer.register_forward_hook(_drop_some)
        return cls(rank, build_batches(plan.run, rank_info=rank.backend))

    def step(self, iteration: int) -> None:
        loop._train_step(self.rank, self.stream, iteration)

    def fingerprint(self, iteration: int) -> dict[str, str]:
        """Everything that later steps depend on, by part."""
        parts: dict[str, Any] = {"weights": [], "optimizer": []}
        for key, _, tensor, _ in named_state(self.rank.model, self.rank.training):
            raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
            parts["optimizer" if key.startswith("optimizer.") else "weights"].append((key, _digest(raw)))
        position = resume.position_of(self.rank, self.stream, iteration)
        parts["optimizer"].append(position.optimizer_steps)
        groups = self.rank.training.optimizer.param_groups
        parts["learning rate"] = [position.learning_rate_steps, [group["lr"] for group in groups]]
        parts["loss scale"] = position.loss_scaling
        parts["data"] = position.consumed_samples
        parts["loss weights"] = self.rank.computation.weights
        parts["random"] = _digest(random_state()["torch"].numpy().tobytes())
        return {name: _digest(json.dumps(part).encode()) for name, part in parts.items()}


def _drop_some(module: Any, inputs: Any, output: Any) -> Any:
    return (torch.nn.functional.dropout(output[0], DROPOUT, training=True), *output[1:])


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def uninterrupted(plan: Plan, checkpoints: Path) -> list[dict[str, str]]:
    """Fingerprints after every iteration; a checkpoint of each is kept in a folder of its own."""
    run, seen = Run.begin(plan), []
    for iteration in range(1, plan.run.training.train_iters + 1):
        run.step(iteration)
        seen.append(run.fingerprint(iteration))
        loop._save(run.rank, run.stream, iteration, checkpoints / str(iteration))
    return seen


def resumed(
    plan: Plan, checkpoints: Path, iteration: int, until: int, forget: Callable[[Run], Any] | None = None
) -> list[dict[str, str]]:
    """Fingerprints after ``iteration`` and each one up to ``until``, from the checkpoint of ``iteration``.

    ``forget`` returns what puts a part of the run back to how it was before the restore.
    """
    run = Run.begin(plan)
    put_back = forget(run) if forget else lambda: None
    found = resume.find_together(checkpoints / str(iteration) / "checkpoints", plan)
    assert found is not None
    assert found.position.iteration == iteration
    assert resume.restore(run.rank, run.stream, found) == []
    shift = put_back() or 0
    seen = []
    for number in range(iteration + 1, until + 1):
        run.step(number + shift)
        seen.append(run.fingerprint(number))
    return seen


def forget_tensors(is_kept: Callable[[str], bool]) -> Callable[[Run], Any]:
    """Leave out the tensors whose names ``is_kept`` refuses."""

    def before(run: Run) -> Any:
        state = {key: (t, t.clone()) for key, _, t, _ in named_state(run.rank.model, run.rank.training)}

        def after() -> None:
            with torch.no_grad():
                for key, (tensor, old) in state.items():
                    if not is_kept(key):
                        tensor.copy_(old)

        return after

    return before


def forget_learning_rate(run: Run) -> Any:
    def after() -> None:
        run.rank.training.learning_rate_steps = 0

    return after


def forget_bias_correction(run: Run) -> Any:
    def after() -> None:
        run.rank.training.optimizer_steps = 0

    return after


def forget_loss_scale(run: Run) -> Any:
    training = run.rank.training
    old = training.loss_scaling

    def after() -> None:
        training.loss_scaling = old

    return after


def forget_data(run: Run) -> Any:
    return lambda: run.stream.seek(0)


def forget_random(run: Run) -> Any:
    state = torch.get_rng_state()
    return lambda: torch.set_rng_state(state)


def forget_loss_weights(run: Run) -> Any:
    """The schedule of the weights starts anew: what it is asked for lies four iterations back."""
    return lambda: -4


FORGETTING: dict[str, Callable[[Run], Any]] = {
    "weights": forget_tensors(lambda key: key.startswith("optimizer.")),
    "first moment": forget_tensors(lambda key: not key.startswith("optimizer.exp_avg.")),
    "second moment": forget_tensors(lambda key: not key.startswith("optimizer.exp_avg_sq.")),
    "master copies": forget_tensors(lambda key: not key.startswith("optimizer.master.")),
    "bias correction": forget_bias_correction,
    "learning rate": forget_learning_rate,
    "loss scale": forget_loss_scale,
    "data": forget_data,
    "random": forget_random,
    "loss weights": forget_loss_weights,
}


def main(plan_file: Path, checkpoints: Path, out: Path) -> None:
    plan = load_plan(plan_file)
    iterations = plan.run.training.train_iters
    whole = uninterrupted(plan, checkpoints)
    result: dict[str, Any] = {
        "whole": whole,
        # A step's fingerprint covers all that the next depends on, so the first step settles the rest.
        "resumed": {
            k: resumed(plan, checkpoints, k, iterations if k in WHOLE_WAY else k + 1)
            for k in range(1, iterations)
        },
        "forgot": {name: resumed(plan, checkpoints, 5, 6, how) for name, how in FORGETTING.items()},
    }
    Path(f"{out}.{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(checkpoints)
    stop()
