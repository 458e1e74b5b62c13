"""The ranks of test_evaluation: one model evaluated in several layouts.

``main`` gets a folder, and layouts; the folder has ``LAYOUT.yaml``, the plan of each, and
gets a folder of that name with what rank 0 would leave in a run folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import forget_layout

from eeplan.plan import load_plan
from eeplan.runtime import evaluation
from eeplan.runtime.backend import stop
from eeplan.runtime.setup import set_up


def main(folder: Path, *layouts: str) -> None:
    for layout in layouts:
        forget_layout()
        rank = set_up(load_plan(folder / f"{layout}.yaml"))
        before = torch.get_rng_state()
        evaluator = evaluation.evaluators(rank)["valid"]
        first, again = evaluator.run(3), evaluator.run(3)
        assert first.losses == again.losses, "the same text each time"
        assert rank.model.training
        assert torch.equal(torch.get_rng_state(), before), "training goes on as if nothing had been evaluated"
        out = folder / layout
        if dist.get_rank() == 0:
            out.mkdir()
            kept = evaluation.write_quality(out, rank.plan, first)
            (out / "kept.json").write_text(json.dumps(kept))
        else:
            assert first.outcomes is None
    stop()
