"""What the planner reaches, as numbers: `python reports/planner/measure.py gaps|fill|times`, JSON on stdout.

gaps   how far the proof of a free layer split comes, by microbatches per stage, within a tenth of the budget
fill   what choosing the fill after the exits loses against choosing both at once, on spaces tried whole
times  CPU seconds of `eeplan plan`, the very first time on a machine and after that

Run files and profiles are those in `profiles/`, with layers and stages changed as each case says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from eeplan.plan import Certificate
from eeplan.profile import OpProfile, load_profile
from eeplan.schema import write_yaml
from eeplan.sim.choice import Choice, PlacedExit, choose, head_of, modes_of
from eeplan.sim.combinations import combinations, models_of
from eeplan.sim.costs import stage_costs
from eeplan.sim.fill_choice import choose_fill
from eeplan.sim.fixed_split import count_vectors
from eeplan.sim.layout import can_hold
from eeplan.sim.search import Budgets, best_slots, judge
from eeplan.spec import RunSpec, load_run, replace_keys

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ROOT / "profiles"


def case(name: str, **keys: Any) -> tuple[RunSpec, OpProfile]:
    """A run of a profile's model in another shape."""
    model = "llama-8b" if name.startswith("llama") else "opt-350m"
    run, _ = load_run(PROFILES / f"{model}.run.yaml")
    profile, _ = load_profile(PROFILES / f"{name}.yaml")
    tp = min(op.tensor_model_parallel_size for op in profile.ops)
    size = min(op.micro_batch_size for op in profile.ops if op.tensor_model_parallel_size == tp)
    changes: dict[str, Any] = {
        "parallel.data_parallel_size": 1,
        "parallel.tensor_model_parallel_size": tp,
        "training.micro_batch_size": size,
        "training.global_batch_size": size * keys.pop("microbatches"),
        "model.num_layers": keys.pop("layers"),
        "parallel.pipeline_model_parallel_size": keys.pop("stages"),
        "parallel.layer_split": keys.pop("split", "auto"),
        "exits.layers": [],
        "exits.count": keys.pop("exits"),
        "limits.device_memory_bytes": None,
    }
    return replace_keys(run, changes), profile


def gaps() -> list[dict[str, Any]]:
    """One row per profile, P and M/P."""
    rows = []
    for name, stages, ratio in product(
        ("opt-350m-a100-40", "llama-8b-a100-40-tp4"), (4, 8), (0.25, 0.5, 1.0, 1.5, 2.0, 8.0)
    ):
        microbatches = max(1, round(ratio * stages))
        run, profile = case(name, layers=8 * stages, stages=stages, exits=3, microbatches=microbatches)
        before = time.process_time()
        choice = choose(models_of(combinations(run, profile)), Budgets(nodes=600_000, ties=1))
        certificate = choice.certificate
        rows.append(
            {
                "profile": name,
                "layers": 8 * stages,
                "stages": stages,
                "microbatches_per_stage": ratio,
                "exits": 3,
                "gap": certificate.gap,
                "optimal": certificate.optimal,
                "evaluated": certificate.evaluated,
                "pruned": certificate.pruned,
                "space_size": certificate.space_size,
                "cpu_s": round(time.process_time() - before, 2),
            }
        )
    return rows


def fill() -> list[dict[str, Any]]:
    """One row per case: inserts of the fill chosen after the placement, and of the best placement for it."""
    rows = []
    for name, stages, exits, microbatches, mode in product(
        ("opt-350m-a100-40", "opt-350m-v100-16"), (4, 8), (1, 2, 3), (8, 32), ("added", "same_count")
    ):
        run, profile = case(
            name, layers=24, stages=stages, exits=exits, microbatches=microbatches, split="uniform"
        )
        run = replace_keys(run, {"fill.policy": "auto", "fill.mode": mode})
        (model,) = models_of(combinations(run, profile))
        chosen = choose([model])
        after = choose_fill(model, chosen)
        best: tuple[float, int] | None = None
        for counts in count_vectors(exits, stages).tolist():
            if not can_hold(counts, model.layout):
                continue
            for where in modes_of(run.exits):
                head = head_of(run.exits)
                composed = tuple(stage_costs(model, s, (head,) * c, where) for s, c in enumerate(counts))
                candidate = judge(model, [(where, composed)])[0]
                slower = candidate.iteration_ns / chosen.candidate.iteration_ns - 1.0
                if slower > 0.001:
                    continue
                placed = tuple(PlacedExit(slot, head, None) for slot in best_slots(candidate))
                nothing = Certificate(optimal=True, evaluated=1, space_size=1)
                filled = choose_fill(model, Choice(placed, candidate, candidate, (), nothing))
                found = (slower, _work(filled.fill))
                if best is None or found[1] > best[1]:
                    best = found
        assert best is not None
        rows.append(
            {
                "profile": name,
                "stages": stages,
                "exits": exits,
                "microbatches": microbatches,
                "mode": mode,
                "stage_backwards_after": _work(after.fill),
                "stage_backwards_jointly": best[1],
                "placement_slower": best[0],
                "lost_share_of_iteration": (best[1] - _work(after.fill)) / (microbatches * stages),
            }
        )
    return rows


def _work(fill: Any) -> int:
    """Backwards of stages that partial microbatches add."""
    return sum(fill.depths) + sum(fill.reaches)


def times() -> list[dict[str, Any]]:
    """One row per case: seconds of the command, interpreter included; cold compiles its kernels first."""
    rows = []
    cases = [
        (
            "first plan, given split",
            {"layers": 60, "stages": 4, "exits": "auto", "microbatches": 64, "split": "uniform"},
        ),
        ("first plan, free split", {"layers": 60, "stages": 4, "exits": "auto", "microbatches": 64}),
        ("96 layers, 16 stages, 4 exits", {"layers": 96, "stages": 16, "exits": 4, "microbatches": 64}),
    ]
    for title, keys in cases:
        with tempfile.TemporaryDirectory() as folder:
            run, profile = case("opt-350m-a100-40", **keys)
            run = replace_keys(run, {"exits.max_count": 6, "fill.policy": "auto"})
            write_yaml(Path(folder) / "run.yaml", run)
            write_yaml(Path(folder) / "profile.yaml", profile)
            seconds = [_plan_seconds(folder) for _ in range(2)]
            rows.append({"case": title, "cold_s": seconds[0], "warm_s": seconds[1]})
    return rows


def _plan_seconds(folder: str) -> float:
    start = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "eeplan",
        "plan",
        "run.yaml",
        "--profile",
        "profile.yaml",
        "-o",
        "p.yaml",
    ]
    environment = os.environ | {"NUMBA_CACHE_DIR": f"{folder}/cache"}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return round(time.perf_counter() - start, 2)


if __name__ == "__main__":
    print(json.dumps({"gaps": gaps, "fill": fill, "times": times}[sys.argv[1]](), indent=1))
