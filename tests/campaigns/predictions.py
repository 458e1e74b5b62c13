"""Iteration time and memory as predicted from a profile, and as measured in 24 real runs on CPU.

Eight groups of runs share shape, microbatch and number of processes, and so one profile, which is measured
right before them; within a group layers, their split, exits, head kinds and the number of microbatches
differ. The campaign's folder keeps what is done, so that one that was stopped goes on where it was.

Every process computes with one thread: two threads of one process wait for each other at every op, so that
whatever else runs on the machine for a moment holds both up, and the trace cannot tell. With one thread it
can: a run is repeated where a stage lacked its core for more than a tenth of the time, or where iterations of
one and the same work differ by more than a quarter. How often is in the result; errors play no part in it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

import eeplan.runtime.launch as launching
import eeplan.runtime.profiler as profiler
from eeplan.console import open_progress
from eeplan.plan import load_plan, write_plan
from eeplan.profile import load_profile
from eeplan.runtime.corpus import demo_corpus
from eeplan.runtime.data import build_from_texts
from eeplan.runtime.preflight import check_training, run_ranks
from eeplan.runtime.tokenizer import byte_tokenizer
from eeplan.schema import validate, write_yaml
from eeplan.sim.planner import make_plan
from eeplan.spec import RunSpec, load_run

ITERATIONS = 12
ATTEMPTS = 4
LEAST_CORE_SHARE = 0.9
MOST_SPREAD = 1.25
"""Of the second slowest iteration over the second fastest."""
CORPUS_BYTES = 300_000


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that share a profile."""

    stages: int
    hidden_size: int
    micro_batch_size: int
    seq_length: int
    vocab_size: int
    cases: tuple[dict[str, Any], ...]
    """``layers``, ``microbatches``, ``exits`` (a number, or requests), and maybe ``split`` and ``heads``."""

    @property
    def name(self) -> str:
        return f"p{self.stages}-h{self.hidden_size}-b{self.micro_batch_size}-v{self.vocab_size}"

    def run(self, case: dict[str, Any]) -> RunSpec:
        """The run file of one case, data paths relative to the campaign's folder."""
        exits = case["exits"]
        wanted: dict[str, Any] = {"count": exits} if isinstance(exits, int) else {"layers": exits}
        return validate(
            {
                "schema_version": 1,
                "name": self.name,
                "model": {
                    "num_layers": case["layers"],
                    "hidden_size": self.hidden_size,
                    "num_attention_heads": 4,
                    "vocab_size": self.vocab_size,
                },
                "parallel": {
                    "pipeline_model_parallel_size": self.stages,
                    "layer_split": case.get("split", "uniform"),
                },
                "training": {
                    "micro_batch_size": self.micro_batch_size,
                    "global_batch_size": self.micro_batch_size * case["microbatches"],
                    "seq_length": self.seq_length,
                    "train_iters": ITERATIONS,
                    "lr_warmup_iters": 2,
                    "eval_iters": 1,
                },
                "data": {"data_path": "data/text", "tokenizer": "data/text.tokenizer.json"},
                "exits": wanted | {"head": case.get("head", "norm")},
            },
            RunSpec,
            "run",
        )


def _case(layers: int, microbatches: int, exits: Any, **more: Any) -> dict[str, Any]:
    return {"layers": layers, "microbatches": microbatches, "exits": exits} | more


def _at(layer: int, head: str = "norm", *, tied: bool = True) -> dict[str, Any]:
    return {"layer": layer, "head": head, "tied": tied}


GROUPS = (
    Group(2, 192, 4, 128, 1024, (
        _case(8, 8, 2), _case(8, 16, 0), _case(12, 8, [_at(3), _at(6), _at(9)]),
    )),
    Group(2, 256, 2, 128, 1024, (
        _case(8, 8, [_at(2, "mlp"), _at(4)]), _case(4, 16, [_at(1, "block")]), _case(8, 12, 1, split=[5, 3]),
    )),
    Group(2, 128, 8, 128, 4096, (
        _case(8, 8, 2, head="minimal"), _case(16, 8, 0),
        _case(12, 6, [_at(3, tied=False), _at(6, "minimal"), _at(9, "mlp")]),
    )),
    Group(2, 320, 1, 256, 2048, (
        _case(6, 8, 1), _case(8, 6, 3), _case(6, 12, 0, split=[4, 2]),
    )),
    Group(1, 192, 4, 128, 1024, (
        _case(8, 4, 2), _case(4, 8, 0), _case(12, 4, 3),
    )),
    Group(1, 256, 2, 128, 1024, (
        _case(8, 6, 1, head="block"), _case(4, 8, 2, head="mlp"), _case(6, 8, 0),
    )),
    Group(1, 128, 8, 128, 4096, (
        _case(6, 4, 2, head="minimal"), _case(12, 4, [_at(3, tied=False), _at(6)]), _case(8, 8, 0),
    )),
    Group(1, 320, 1, 256, 2048, (
        _case(4, 8, 1), _case(8, 4, 3), _case(6, 6, 0),
    )),
)  # fmt: skip


def run_campaign(folder: Path, groups: Sequence[Group] = GROUPS) -> list[dict[str, Any]]:
    """Do what ``folder`` lacks; one result for each case, see :func:`compare`."""
    if not (folder / "data/text.json").is_file():
        texts = [text for _, text in demo_corpus(CORPUS_BYTES)]
        build_from_texts(texts, folder / "data/text", byte_tokenizer())
    with _one_thread():
        return [
            _run_case(folder, group, index, case)
            for group in groups
            for index, case in enumerate(group.cases)
        ]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let every process that is started compute with one thread."""
    real = launching.default_threads
    for module in (launching, profiler):
        vars(module)["default_threads"] = lambda nproc: 1
    try:
        yield
    finally:
        for module in (launching, profiler):
            vars(module)["default_threads"] = real


def _run_case(folder: Path, group: Group, index: int, case: dict[str, Any]) -> dict[str, Any]:
    name = f"{group.name}-{index + 1}"
    out, profile_path = folder / name, folder / f"{group.name}.profile.yaml"
    run_path, plan_path = folder / f"{name}.run.yaml", folder / f"{name}.plan.yaml"
    if not plan_path.is_file():
        write_yaml(run_path, group.run(case))
        run, run_sha256 = load_run(run_path)
        if not profile_path.is_file():
            write_yaml(profile_path, profiler.measure(run))
        write_plan(plan_path, make_plan(run, run_sha256, *load_profile(profile_path)))
    plan = load_plan(plan_path)
    attempts = _attempts(folder, name)
    while not attempts or (len(attempts) < ATTEMPTS and is_disturbed(attempts[-1])):
        shutil.rmtree(out, ignore_errors=True)
        check_training(plan_path, out)
        with open_progress() as progress:
            run_ranks(plan_path, plan, out, progress)
        attempt = folder / f"{name}.measured-{len(attempts) + 1}.json"
        attempt.write_bytes((out / "measured.json").read_bytes())
        attempts = _attempts(folder, name)
    measured = next((one for one in attempts if not is_disturbed(one)), min(attempts, key=_spread))
    return compare(
        {"run": name, "group": group.name, "exits": [f"{e.depth} {e.head}" for e in plan.exits]}
        | {"layers": case["layers"], "microbatches": case["microbatches"], "split": case.get("split")}
        | {"attempts": len(attempts)},
        plan.prediction.iteration_time_s,
        [stage.memory.peak_bytes for stage in plan.stages],
        measured,
    )


def _attempts(folder: Path, name: str) -> list[dict[str, Any]]:
    """What was measured so far, in order."""
    paths = (folder / f"{name}.measured-{number}.json" for number in range(1, ATTEMPTS + 1))
    return [json.loads(path.read_text()) for path in paths if path.is_file()]


def is_disturbed(measured: dict[str, Any]) -> bool:
    """Whether other work on the machine slowed the run; its own times say so, not the prediction."""
    shares = measured["core_share"]
    return (shares is not None and min(shares) < LEAST_CORE_SHARE) or _spread(measured) > MOST_SPREAD


def _spread(measured: dict[str, Any]) -> float:
    ordered = sorted(measured["iteration_times_s"])
    return float(ordered[-2] / ordered[1])


def compare(
    about: dict[str, Any], iteration_s: float, peak_bytes: Sequence[int], measured: dict[str, Any]
) -> dict[str, Any]:
    """Predicted and measured beside each other; errors are predicted over measured, minus 1."""
    return about | {
        "predicted_iteration_s": iteration_s,
        "measured_iteration_s": measured["iteration_time_s"],
        "iteration_error": iteration_s / measured["iteration_time_s"] - 1.0,
        "predicted_peak_bytes": list(peak_bytes),
        "measured_peak_bytes": measured["peak_bytes"],
        "peak_errors": [p / m - 1.0 for p, m in zip(peak_bytes, measured["peak_bytes"], strict=True)],
        "core_share": measured["core_share"],
    }


def summarize(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``n``; time: ``mean_abs``, ``mean_signed``, ``max_abs``, ``spearman``; memory: ``peak_mean_abs``,
    ``peak_max_abs``, over stages of all runs."""
    errors = [result["iteration_error"] for result in results]
    peaks = [error for result in results for error in result["peak_errors"]]
    ranks = spearmanr(
        [result["predicted_iteration_s"] for result in results],
        [result["measured_iteration_s"] for result in results],
    )
    return {
        "n": len(results),
        "mean_abs": statistics.mean(map(abs, errors)),
        "mean_signed": statistics.mean(errors),
        "max_abs": max(map(abs, errors)),
        "spearman": float(ranks.statistic),
        "peak_mean_abs": statistics.mean(map(abs, peaks)),
        "peak_max_abs": max(map(abs, peaks)),
    }


def failures(summary: dict[str, Any]) -> list[str]:
    """Which of the stated accuracies do not hold; empty if all do."""
    limits = {"mean_abs": 0.05, "max_abs": 0.12, "peak_mean_abs": 0.03}
    found = [f"{key} is {summary[key]:.1%}" for key, most in limits.items() if summary[key] > most]
    if summary["spearman"] < 0.95:
        found.append(f"spearman is {summary['spearman']:.3f}")
    return found
