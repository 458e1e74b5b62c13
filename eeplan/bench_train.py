"""``eeplan bench train``: our executor against megatron-core's 1F1B, and what planned exits cost.

Imports neither torch nor megatron-core; the timing runs in processes of its own
(``runtime.benches.train_worker``).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eeplan.plan import Plan, write_plan
from eeplan.profile import OpProfile, load_profile
from eeplan.schema import write_yaml
from eeplan.spec import DataSpec, ExitsSpec, ModelSpec, ParallelSpec, RunSpec, TrainingSpec, load_run

STAGES = (1, 2)
ROUNDS = 24
NUM_EXITS = 2
WORKER = "eeplan.runtime.benches.train_worker"


def bench_run(stages: int, num_exits: int) -> RunSpec:
    """The model that is timed: small, so that time around the ops shows; untied, as the stock schedule
    reduces tied matrices in groups of its own."""
    return RunSpec(
        schema_version=1,
        name=f"bench-p{stages}",
        model=ModelSpec(
            num_layers=8,
            hidden_size=256,
            num_attention_heads=4,
            vocab_size=4096,
            untie_embeddings_and_output_weights=True,
        ),
        parallel=ParallelSpec(pipeline_model_parallel_size=stages),
        training=TrainingSpec(micro_batch_size=2, global_batch_size=16, seq_length=128, train_iters=1),
        data=DataSpec(data_path="none", tokenizer="none"),
        exits=ExitsSpec(count=num_exits),
    )


def bench_train(
    *,
    stages: Sequence[int] = STAGES,
    rounds: int = ROUNDS,
    run_of: Callable[[int, int], RunSpec] = bench_run,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Time iterations of every number of pipeline stages.

    Args:
        rounds: each runs every contender once; ratios are within a round.
        run_of: run of so many stages and exits.
        progress: called with the name of each step.

    Returns:
        ``ratio_to_stock``, the largest of the cases' ratios (below 1: ours is faster); ``hardware``;
        ``model``; ``cases``, see :func:`case_of`.

    Raises:
        LaunchError: a process died.
    """
    cases, profiles = [], list[OpProfile]()
    for number in stages:
        with tempfile.TemporaryDirectory(prefix="eeplan-bench-") as name:
            folder = Path(name)
            progress(f"{number} stages: measure op costs")
            profile, plans = _plans(folder, run_of, number)
            progress(f"{number} stages: {rounds} rounds")
            cases.append(case_of(plans, _times(folder, number, rounds)))
            profiles.append(profile)
    run = run_of(1, NUM_EXITS)
    return {
        "ratio_to_stock": max(case["ratio_to_stock"] for case in cases),
        "hardware": hardware(profiles[-1]),
        "model": run.model.model_dump(mode="json") | {"seq_length": run.training.seq_length},
        "cases": cases,
    }


def hardware(profile: OpProfile) -> dict[str, Any]:
    """Device, software and threads that a measurement ran with."""
    return {
        "device": profile.device.model_dump(mode="json"),
        "software": dict(profile.software),
        "threads": profile.threads,
    }


def case_of(plans: Mapping[str, Plan], measured: Mapping[str, Any]) -> dict[str, Any]:
    """What one number of stages gave.

    Args:
        plans: ``plain`` and ``exits``.
        measured: ``seconds`` of each contender by round, and ``difference`` of the gradients.

    Returns:
        ``p``, ``m``, ``rounds``; medians ``own_s``, ``stock_s``, ``exits_s``; ``ratio_to_stock``, median over
        rounds of own over stock, with ``ratio_p10`` and ``ratio_p90``; ``gradient_difference``, relative;
        ``exits``, their depths; ``exit_overhead``, measured median over rounds and predicted: by how much the
        iteration with exits is longer, and both in seconds.
    """
    plain, exits = plans["plain"], plans["exits"]
    seconds = measured["seconds"]
    ratios = sorted(own / stock for own, stock in zip(seconds["own"], seconds["stock"], strict=True))
    longer = [with_ / without for with_, without in zip(seconds["exits"], seconds["own"], strict=True)]
    predicted = {name: _predicted_s(plan) for name, plan in plans.items()}
    return {
        "p": len(plain.stages),
        "m": plain.num_microbatches,
        "rounds": len(ratios),
        **{f"{name}_s": statistics.median(values) for name, values in seconds.items()},
        "ratio_to_stock": statistics.median(ratios),
        "ratio_p10": ratios[len(ratios) // 10],
        "ratio_p90": ratios[-1 - len(ratios) // 10],
        "gradient_difference": measured["difference"],
        "exits": [exit_.depth for exit_ in exits.exits],
        "exit_overhead": {
            "measured": statistics.median(longer) - 1.0,
            "predicted": predicted["exits"] / predicted["plain"] - 1.0,
            "predicted_plain_s": predicted["plain"],
            "predicted_exits_s": predicted["exits"],
        },
    }


def _predicted_s(plan: Plan) -> float:
    """Of what is timed: pipeline and gradient synchronisation."""
    return plan.prediction.pipeline_s + plan.prediction.grad_sync_s


def _plans(
    folder: Path, run_of: Callable[[int, int], RunSpec], stages: int
) -> tuple[OpProfile, dict[str, Plan]]:
    """Measure op costs and plan both runs; files in ``folder``."""
    from eeplan.runtime.profiler import measure
    from eeplan.sim.planner import make_plan

    write_yaml(folder / "profile.yaml", measure(run_of(stages, NUM_EXITS)))
    profile, profile_sha256 = load_profile(folder / "profile.yaml")
    plans = {}
    for name, num_exits in (("plain", 0), ("exits", NUM_EXITS)):
        write_yaml(folder / f"{name}.run.yaml", run_of(stages, num_exits))
        run, run_sha256 = load_run(folder / f"{name}.run.yaml")
        plans[name] = write_plan(folder / f"{name}.yaml", make_plan(run, run_sha256, profile, profile_sha256))
    return profile, plans


def _times(folder: Path, stages: int, rounds: int) -> dict[str, Any]:
    from eeplan.runtime.launch import launch

    launch(WORKER, [str(folder), str(rounds)], nproc=stages)
    found: dict[str, Any] = json.loads((folder / "times.json").read_text())
    return found
