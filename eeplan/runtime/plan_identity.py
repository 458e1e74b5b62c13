"""Whether two plans train the same model: the hash that a checkpoint is refused by.

Imports neither torch nor megatron-core.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eeplan.files import sha256_bytes
from eeplan.plan import Plan
from eeplan.schema import dump_yaml
from eeplan.spec import ExitRequest, ExitsSpec, LossWeightSpec, ParallelSpec, with_data_paths

_BOOKKEEPING: dict[str, Any] = {
    "log_interval": 1,
    "eval_iters": 1,
    "eval_interval": None,
    "async_save": False,
    "wandb_project": None,
    "save_interval": None,
    "keep_checkpoints": 1,
}


def training_hash(plan: Plan) -> str:
    """SHA-256 of everything in a plan that decides what is learned: all but the parallel layout.

    Plans that differ in pipeline, tensor or data-parallel size, in how layers are split, in predictions, or
    in how often is logged, evaluated and saved have the same hash. Bubble filling draws other data for
    another layout, so a filled plan keeps its layout.
    """
    run = with_data_paths(plan.run, lambda path: Path(path).name)
    parts = [
        run.model,
        run.training.model_copy(update=_BOOKKEEPING),
        run.data,
        run.parallel if plan.fill else ParallelSpec(),
        *(exit_.model_copy(update={"stage": 0}) for exit_ in plan.exits),
    ]
    optional = [part for part in (plan.loss_weight_schedule, plan.fill, _losses(plan)) if part is not None]
    return sha256_bytes("---\n".join(dump_yaml(part) for part in (*parts, *optional)).encode())


def _losses(plan: Plan) -> ExitsSpec | None:
    """What is said about early losses beside their weights; None when it is all the default."""
    exits = plan.run.exits
    options = ExitsSpec(
        layers=tuple(
            ExitRequest(layer=exit_.depth, temperature=exits.temperature_at(exit_.depth))
            for exit_ in plan.exits
        )
        if any(exits.temperature_at(exit_.depth) != 1.0 for exit_ in plan.exits)
        else (),
        loss_weights=LossWeightSpec(dynamic=exits.loss_weights.dynamic),
        distillation=exits.distillation,
    )
    return options if plan.exits and options != ExitsSpec() else None
