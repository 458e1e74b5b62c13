"""Does training converge with early exits as it does without (EE-LLM 5.1)? Six runs, and how to judge them.

Small models on 21 MB of real text (``campaigns.text``), same data and order: planned exits and none, three
seeds each. Every step that is done is not done again, so a stopped campaign goes on where it was::

    PYTHONPATH=tests python -m campaigns.convergence --texts FOLDER --out FOLDER

One process and one thread at a time; less than an hour of CPU in all.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from campaigns.text import read_corpus

from eeplan.console import open_progress
from eeplan.plan import load_plan, write_plan
from eeplan.profile import load_profile
from eeplan.report.style import png
from eeplan.runtime.data import build_from_texts
from eeplan.runtime.preflight import check_training, run_ranks
from eeplan.runtime.profiler import measure
from eeplan.runtime.tokenizer import train_bpe
from eeplan.schema import write_yaml
from eeplan.sim.planner import make_plan
from eeplan.spec import DataSpec, ExitsSpec, ModelSpec, RunSpec, TrainingSpec, load_run

SEEDS = (1, 2, 3)
EXIT_COUNTS = (0, 2)
VOCAB_SIZE = 2048
SMOOTH = 25
"""Iterations whose training losses are averaged to one point of a curve."""
MOST_WORSE = 0.01
"""Of the final exit's validation loss, mean over seeds, against the baseline's."""


def convergence_run(num_exits: int, seed: int) -> RunSpec:
    """One of the runs; data paths are relative to the campaign's folder."""
    return RunSpec(
        schema_version=1,
        name=f"exits{num_exits}-seed{seed}",
        model=ModelSpec(
            num_layers=6, hidden_size=96, num_attention_heads=4, vocab_size=VOCAB_SIZE, init_method_std=0.05
        ),
        training=TrainingSpec(
            micro_batch_size=8,
            global_batch_size=8,
            seq_length=128,
            train_iters=700,
            lr=3e-3,
            min_lr=3e-4,
            lr_warmup_iters=50,
            seed=seed,
            eval_iters=32,
            log_interval=50,
        ),
        data=DataSpec(data_path="data/text", tokenizer="data/text.tokenizer.json"),
        exits=ExitsSpec(count=num_exits),
    )


def run_campaign(texts: Path, out: Path) -> None:
    """All runs that ``out`` does not hold yet, seed by seed."""
    if not (out / "data/text.json").is_file():
        corpus = read_corpus(texts)
        built = build_from_texts(corpus.texts, out / "data/text", train_bpe(corpus.texts, VOCAB_SIZE))
        facts = {"bytes": corpus.num_bytes, "sha256": corpus.sha256, "documents": len(corpus.texts)}
        (out / "corpus.json").write_text(json.dumps(facts | {"tokens": built.tokens}, indent=1) + "\n")
    if not (out / "profile.yaml").is_file():
        write_yaml(out / "run.yaml", convergence_run(2, 1))
        write_yaml(out / "profile.yaml", measure(load_run(out / "run.yaml")[0], seconds=2.0))
    for seed in SEEDS:
        for num_exits in EXIT_COUNTS:
            _train(out, convergence_run(num_exits, seed))


def _train(out: Path, run: RunSpec) -> None:
    """Plan and train one run, unless it is done; goes on from its last checkpoint."""
    run_path, plan_path = out / f"{run.name}.run.yaml", out / f"{run.name}.plan.yaml"
    if not plan_path.is_file():
        write_yaml(run_path, run)
        write_plan(plan_path, make_plan(*load_run(run_path), *load_profile(out / "profile.yaml")))
    check_training(plan_path, out / run.name)
    with open_progress() as progress:
        run_ranks(plan_path, load_plan(plan_path), out / run.name, progress)


@dataclass(frozen=True, slots=True)
class Curve:
    """Losses of one head in one run."""

    num_exits: int
    seed: int
    head: str
    training: tuple[tuple[int, float], ...]
    """(last iteration averaged, mean loss in nats per token); no text is seen twice, so that it is a loss on
    unseen text as well."""
    validation: float
    """After the last iteration."""


def read_curves(out: Path) -> list[Curve]:
    """Every head of every run in the campaign's folder."""
    return [
        curve
        for num_exits in EXIT_COUNTS
        for seed in SEEDS
        for curve in curves_of(
            num_exits, seed, (out / f"exits{num_exits}-seed{seed}" / "metrics.jsonl").read_text().splitlines()
        )
    ]


def curves_of(num_exits: int, seed: int, lines: Sequence[str]) -> Iterator[Curve]:
    """Curves from the lines of a run's ``metrics.jsonl``."""
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    train = [record for record in records if record["kind"] == "train"]
    last = [record for record in records if record["kind"] == "validation"][-1]
    if last["iteration"] != train[-1]["iteration"]:
        raise ValueError(f"exits {num_exits}, seed {seed}: the run has not ended")
    for head, validation in last["losses"].items():
        points = tuple(
            (group[-1]["iteration"], mean(record["losses"][head] for record in group))
            for group in (train[i : i + SMOOTH] for i in range(0, len(train), SMOOTH))
        )
        yield Curve(num_exits, seed, head, points, validation)


def write_csv(path: Path, curves: Sequence[Curve]) -> None:
    """One row for each point: exits, seed, head, kind, iteration, loss."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("exits", "seed", "head", "kind", "iteration", "loss_nats"))
        for c in curves:
            for iteration, loss in c.training:
                writer.writerow((c.num_exits, c.seed, c.head, "training", iteration, f"{loss:.5f}"))
            last = c.training[-1][0]
            writer.writerow((c.num_exits, c.seed, c.head, "validation", last, f"{c.validation:.5f}"))


def judge(curves: Sequence[Curve]) -> dict[str, Any]:
    """Compare runs with exits and without.

    Returns:
        ``final_with_exits``, ``final_without``: mean validation loss over seeds; ``ratio`` of both;
        ``ratios_by_seed``; ``heads``: mean validation loss of every head with exits, shallowest first;
        ``late_slopes``: of every head, mean change of the training loss over the second half, in nats.
    """
    with_exits = [curve for curve in curves if curve.num_exits]
    without = {curve.seed: curve.validation for curve in curves if not curve.num_exits}
    finals = {curve.seed: curve.validation for curve in with_exits if curve.head == "final"}
    heads = list(dict.fromkeys(curve.head for curve in with_exits))
    return {
        "final_with_exits": mean(finals.values()),
        "final_without": mean(without.values()),
        "ratio": mean(finals.values()) / mean(without.values()),
        "ratios_by_seed": {str(seed): finals[seed] / without[seed] for seed in finals},
        "heads": {head: mean(c.validation for c in with_exits if c.head == head) for head in heads},
        "late_slopes": {head: mean(_late_slope(c) for c in with_exits if c.head == head) for head in heads},
        "late_slope_without": mean(_late_slope(c) for c in curves if not c.num_exits),
    }


def failures(verdict: dict[str, Any]) -> list[str]:
    """What does not hold of EE-LLM 5.1; empty if all does."""
    found = []
    if verdict["ratio"] > 1 + MOST_WORSE:
        found.append(f"the final exit's loss is {verdict['ratio'] - 1:.1%} above that without exits")
    losses = list(verdict["heads"].values())
    if losses != sorted(losses, reverse=True) or losses[0] > 1.25 * losses[-1]:
        found.append(f"early exits are not somewhat above the final one: {verdict['heads']}")
    for head, slope in verdict["late_slopes"].items():
        if not 0.5 < slope / verdict["late_slopes"]["final"] < 1.5:
            found.append(f"{head} falls at another rate: {slope:.3f} nats in the second half")
    return found


def _late_slope(curve: Curve) -> float:
    """Change of the training loss over the second half: last fifth against third fifth, in nats."""
    fifth = len(curve.training) // 5
    losses = [loss for _, loss in curve.training]
    return mean(losses[-fifth:]) - mean(losses[2 * fifth : 3 * fifth])


def write_verdict(out: Path, folder: Path, curves: Sequence[Curve]) -> dict[str, Any]:
    """``verdict.json`` with what the campaign in ``folder`` ran on, and ``curves.png``; the verdict."""
    from campaigns.figures import convergence_figure

    verdict = judge(curves)
    corpus = json.loads((folder / "corpus.json").read_text())
    measured = [
        json.loads((folder / f"exits{n}-seed{seed}" / "measured.json").read_text())
        for n in EXIT_COUNTS
        for seed in SEEDS
    ]
    device = measured[0]["device"]
    exits = [exit_.depth for exit_ in load_plan(folder / f"exits{max(EXIT_COUNTS)}-seed1.plan.yaml").exits]
    run = convergence_run(0, SEEDS[0])
    tokens = run.training.train_iters * run.training.global_batch_size * run.training.seq_length
    about = {"exits": exits, "corpus": corpus, "tokens_per_run": tokens, "device": device}
    about["wall_s"] = [one["wall_s"] for one in measured]
    (out / "verdict.json").write_text(json.dumps(verdict | about, indent=1) + "\n")
    caption = (
        f"{run.model.num_layers} layers, hidden {run.model.hidden_size}; {tokens / 1e6:.2f} M tokens a run "
        f"of {corpus['bytes'] / 1e6:.0f} MB; 3 seeds. Final exit "
        f"{verdict['ratio'] - 1:+.1%} against no exits."
    )
    (out / "curves.png").write_bytes(png(convergence_figure(curves, caption)))
    return verdict


def main() -> None:
    """Run what is missing, then write curves and verdict into the campaign's folder."""
    parser = argparse.ArgumentParser(prog="campaigns.convergence")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    run_campaign(arguments.texts, arguments.out)
    curves = read_curves(arguments.out)
    write_csv(arguments.out / "curves.csv", curves)
    print(json.dumps(write_verdict(arguments.out, arguments.out, curves), indent=1))


if __name__ == "__main__":
    main()
