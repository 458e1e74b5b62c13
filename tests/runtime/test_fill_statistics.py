"""Filled bubbles leave the gradient unbiased, and change its variance as theory says (EE-LLM 3.3, C.2).

Text is drawn from a finite population, so that expectations are exact sums. What every text contributes as
each kind of microbatch comes from the real ``StageComputation`` of every stage, one process handing messages
from stage to stage; a draw of an iteration is then a sum of such contributions, because accumulation is one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_plan, make_run
from torch import Tensor

from eeplan.plan import Plan
from eeplan.runtime.backend import Backend
from eeplan.runtime.model import build_model, stage_specs
from eeplan.runtime.stage import Batch, StageComputation, loss_weights, partial_microbatches
from eeplan.sim.estimator import corrections_of
from eeplan.sim.fill import fill_of, schedule_of
from eeplan.sim.schedule import Kind, Op

SEQ_LENGTH = 12
DRAWS = 2500
EVIDENCE = Path(__file__).parents[2] / "reports" / "training" / "fill_statistics.json"

Gradients = dict[tuple[int, str], Tensor]
"""By (stage, parameter), one row per text; a tied matrix has a copy on several stages."""


@dataclass(frozen=True, slots=True)
class Contributions:
    """Every slot of an iteration, and what each text adds to the gradient from there."""

    slots: tuple[Kind, ...]
    of_kind: dict[Kind, Gradients]

    def summed(self, kind: Kind) -> dict[str, Tensor]:
        """Over the stages' copies, by parameter."""
        total: dict[str, Tensor] = {}
        for (_, name), rows in self.of_kind[kind].items():
            total[name] = total[name] + rows if name in total else rows
        return total

    def expectation(self) -> dict[str, Tensor]:
        """Of the gradient of an iteration whose texts are drawn independently."""
        mean: dict[str, Tensor] = {}
        for kind in self.slots:
            for name, rows in self.summed(kind).items():
                mean[name] = mean.get(name, torch.zeros(rows.shape[1:])) + rows.mean(0)
        return mean

    def variance(self, stage: int, name: str) -> float:
        """Of one stage's copy of a parameter, summed over its elements."""
        key = (stage, name)
        spreads = (
            self.of_kind[kind][key].var(0, correction=0).sum()
            for kind in self.slots
            if key in self.of_kind[kind]
        )
        return float(sum(spreads))

    def draws(self, direction: dict[str, Tensor], picks: Tensor) -> dict[str, Tensor]:
        """Projections of drawn gradients on a direction, by parameter [draws].

        Args:
            picks: texts [draws, slots].
        """
        on_line = {
            kind: {
                name: rows.flatten(1) @ direction[name].flatten() for name, rows in self.summed(kind).items()
            }
            for kind in set(self.slots)
        }
        drawn: dict[str, Tensor] = {}
        for slot, kind in enumerate(self.slots):
            for name, values in on_line[kind].items():
                drawn[name] = drawn.get(name, torch.zeros(len(picks))) + values[picks[:, slot]]
        return drawn


def plan_of(
    stages: int,
    fill: tuple[int, int] | None,
    *,
    mode: str = "added",
    microbatches: int = 6,
    tied: bool = True,
) -> Plan:
    """One layer a stage, three exits, and on two stages exits on both."""
    layers = max(stages, 4)
    run = make_run(
        model={
            "num_layers": layers,
            "hidden_size": 24,
            "num_attention_heads": 2,
            "vocab_size": 60,
            "make_vocab_size_divisible_by": 64,
            "untie_embeddings_and_output_weights": not tied,
            "init_method_std": 0.15,
        },
        parallel={"pipeline_model_parallel_size": stages},
        training={
            "micro_batch_size": 1,
            "global_batch_size": microbatches,
            "seq_length": SEQ_LENGTH,
            "train_iters": 1,
        },
        exits={
            "layers": [
                {"layer": 1, "boundary": "after", "head": "norm"},
                {"layer": 2, "boundary": "after", "head": "minimal", "tied": False},
                {"layer": 3, "boundary": "after", "head": "mlp", "tied": False},
            ]
        },
        fill={"policy": {"warmup": fill[0], "cooldown": fill[1]} if fill else "none", "mode": mode},
    )
    return make_plan(run)


def contributions(plan: Plan, here: Backend, texts: Tensor, *, corrected: bool = True) -> Contributions:
    """What each of ``texts`` [N, S] adds as every kind of microbatch.

    Args:
        corrected: with the plan's loss weights and gradient scales; else with the target weights alone.
    """
    schedule, num_stages = schedule_of(plan), len(plan.stages)
    scales = corrections_of(plan).gradient_scales if corrected else (1.0,) * num_stages
    weights = loss_weights(plan, 1)
    if not corrected:
        weights |= {f"exit_{exit_.depth}": exit_.target_weight for exit_ in plan.exits}
    stages = [
        StageComputation(
            build_model(plan.run, spec, here),
            weights,
            plan.exit_forward,
            fill_of(plan).num_full,
            partial_microbatches(schedule, scales, stage),
        )
        for stage, spec in enumerate(stage_specs(plan))
    ]
    slots = schedule.kinds or tuple(schedule.kind(m) for m in range(schedule.num_microbatches))
    of_kind = {
        kind: _of_kind(stages, scales, kind, slots.index(kind), texts) for kind in dict.fromkeys(slots)
    }
    return Contributions(slots, of_kind)


def _of_kind(
    stages: list[StageComputation], scales: tuple[float, ...], kind: Kind, microbatch: int, texts: Tensor
) -> Gradients:
    rows: dict[tuple[int, str], list[Tensor]] = {}
    for text in texts:
        batch = Batch(
            text[None, :-1], text[None, 1:], torch.ones(1, SEQ_LENGTH), torch.arange(SEQ_LENGTH)[None]
        )
        message: Tensor | None = None
        for stage, computation in enumerate(stages):
            if kind.has(Op.FORWARD, stage):
                message = computation.forward(microbatch, message, batch)
        gradient: Tensor | None = None
        for stage in reversed(range(len(stages))):
            if kind.has(Op.BACKWARD, stage):
                gradient, _ = stages[stage].backward(microbatch, gradient)
                for name, parameter in stages[stage].model.named_global_parameters():
                    if parameter.grad is not None:
                        rows.setdefault((stage, name), []).append(parameter.grad * scales[stage])
                        parameter.grad = None
    return {key: torch.stack(values) for key, values in rows.items()}


def texts_of(count: int) -> Tensor:
    """A population [count, S + 1] with regularities, so that gradients do not vanish in the mean."""
    generator = torch.Generator().manual_seed(5)
    starts = torch.randint(0, 60, (count, 1), generator=generator)
    steps = torch.randint(1, 4, (count, SEQ_LENGTH + 1), generator=generator)
    return (starts + steps.cumsum(1)) % 60


def standard_errors(found: Contributions, wanted: dict[str, Tensor], seed: int = 0) -> dict[str, float]:
    """By parameter: how far the mean of the draws lies from the full gradient, along it."""
    generator = torch.Generator().manual_seed(seed)
    population = len(next(iter(found.of_kind[found.slots[0]].values())))
    picks = torch.randint(0, population, (DRAWS, len(found.slots)), generator=generator)
    distances = {}
    for name, values in found.draws(wanted, picks).items():
        error = float(values.std()) / len(values) ** 0.5
        distances[name] = abs(float(values.mean()) - float(wanted[name].square().sum())) / error
    return distances


def bias(found: Contributions, wanted: dict[str, Tensor]) -> dict[str, float]:
    """By parameter: relative distance of the exact expectation from the full gradient."""
    return {
        name: float((value - wanted[name]).norm() / wanted[name].norm())
        for name, value in found.expectation().items()
    }


def report_of(stages: int, fill: tuple[int, int], mode: str, here: Backend, count: int) -> dict[str, Any]:
    """Bias of a filled iteration, exact and by draws, with and without the corrections."""
    texts = texts_of(count)
    wanted = contributions(plan_of(stages, None), here, texts).expectation()
    plan = plan_of(stages, fill, mode=mode)
    found = contributions(plan, here, texts)
    without = contributions(plan, here, texts, corrected=False)
    assert set(found.expectation()) == set(wanted)
    return {
        "stages": stages,
        "mode": mode,
        "inserts": list(fill),
        "draws": DRAWS,
        "parameter_groups": len(wanted),
        "largest_standard_errors": max(standard_errors(found, wanted).values()),
        "largest_bias": max(bias(found, wanted).values()),
        "uncorrected_largest_standard_errors": max(standard_errors(without, wanted).values()),
        "uncorrected_largest_bias": max(bias(without, wanted).values()),
    }


def require_unbiased(report: dict[str, Any]) -> None:
    assert report["largest_standard_errors"] < 3.0, report
    assert report["largest_bias"] < 1e-4, report
    # Negative control: the same sums without the corrections.
    assert report["uncorrected_largest_standard_errors"] > 10.0, report
    assert report["uncorrected_largest_bias"] > 0.05, report


def test_a_filled_gradient_is_unbiased(one_process: Backend) -> None:
    require_unbiased(report_of(4, (3, 2), "added", one_process, count=10))


def variance_ratios(here: Backend, fill: tuple[int, int], count: int) -> list[tuple[float, float]]:
    """(variance against the plain schedule's, as predicted) of every parameter of every stage."""
    texts, plan = texts_of(count), plan_of(4, fill, tied=False)
    plain = contributions(plan_of(4, None, tied=False), here, texts)
    found, (whole,) = contributions(plan, here, texts), plain.of_kind.values()
    assert plan.fill is not None
    full, pairs = plan.fill.num_full, list[tuple[float, float]]()
    for (stage, name), rows in whole.items():
        if fill[1]:
            reaching = sum(reach >= 4 - stage for reach in plan.fill.truncated_reaches)
            predicted = full / (full + reaching)
        else:
            predicted = _predicted_with_inserts(found, stage, name, rows)
        pairs.append((found.variance(stage, name) / plain.variance(stage, name), predicted))
    return pairs


def _predicted_with_inserts(found: Contributions, stage: int, name: str, whole: Tensor) -> float:
    """With one warm-up insert: c Var(A) + 2c Cov(A, B) + Var(B) over Var(A + B), c = M / (M + 1).

    A is the gradient of the losses that the insert meets, B that of the later ones.
    """
    (insert,) = [kind for kind in found.of_kind if kind.name == "warm_up"]
    num_full = len(found.slots) - 1
    factor = num_full / (num_full + 1)
    rows = found.of_kind[insert].get((stage, name))
    met = torch.zeros_like(whole) if rows is None else rows / factor
    later = whole - met

    def covariance(a: Tensor, b: Tensor) -> float:
        return float(((a - a.mean(0)) * (b - b.mean(0))).mean(0).sum())

    spread = factor * covariance(met, met) + 2 * factor * covariance(met, later) + covariance(later, later)
    return spread / covariance(whole, whole)


def test_truncated_microbatches_lower_the_variance_by_as_much_as_they_add(one_process: Backend) -> None:
    ratios = variance_ratios(one_process, (0, 2), count=6)
    for found, predicted in ratios:
        assert found == pytest.approx(predicted, rel=1e-3)
    assert min(predicted for _, predicted in ratios) < 0.8


def test_warm_up_inserts_change_the_variance_by_the_covariance_of_early_and_late(
    one_process: Backend,
) -> None:
    ratios = variance_ratios(one_process, (1, 0), count=6)
    for found, predicted in ratios:
        assert found == pytest.approx(predicted, rel=1e-3)
    assert any(predicted < 0.999 for _, predicted in ratios)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_filled_gradients_are_unbiased(one_process: Backend) -> None:
    """Both modes, both regions alone and together, two to eight stages."""
    reports = []
    for stages, fills in ((2, [(1, 1)]), (4, [(3, 0), (0, 3), (3, 3)]), (8, [(4, 4)])):
        for fill in fills:
            for mode in ("added", "same_count"):
                if mode == "same_count" and sum(fill) >= 6:
                    continue
                reports.append(report_of(stages, fill, mode, one_process, count=24))
    EVIDENCE.parent.mkdir(parents=True, exist_ok=True)
    EVIDENCE.write_text(json.dumps(reports, indent=1) + "\n")
    for report in reports:
        require_unbiased(report)
