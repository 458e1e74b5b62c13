"""The page's sections: sentences made of the run's numbers, around tables and drawings."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from eeplan.plan import Plan
from eeplan.report import markup, tables, words
from eeplan.report.compare import (
    OpTime,
    exit_quantities,
    idle_share,
    memory_quantities,
    time_quantities,
)
from eeplan.report.rundir import RunData, Sample

_LINE_END = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"


def caption(run: RunData) -> str:
    """Hardware and batch, for the foot of every figure."""
    device, training = run.measured.device, run.plan.run.training
    return (
        f"{device.name}, {words.plural(device.cores, 'core')}, "
        f"{words.plural(run.measured.threads, 'thread')} per process, {training.precision}; "
        f"{words.plural(run.plan.num_microbatches, 'microbatch', 'microbatches')} of "
        f"{training.micro_batch_size} × {training.seq_length:,} tokens"
    )


def timeline(run: RunData, drawings: Mapping[str, str], shown: int) -> str:
    """Both timelines on one axis; ``shown`` is the iteration that was drawn."""
    recorded = len(run.timelines)
    chosen = "the only one recorded" if recorded == 1 else f"the median in time of {recorded} recorded ones"
    predicted = words.percent(run.plan.prediction.bubble_fraction)
    measured = words.percent(idle_share(dict(run.timelines)[shown]))
    return markup.section(
        "timeline",
        "One iteration, op by op",
        markup.paragraph(
            f"Each stage's upper row is the simulated iteration, the lower one iteration {shown} as it ran, "
            f"{chosen}. One schedule drives both. During the pipeline part stages stand idle for {predicted} "
            f"of the time as predicted, for {measured} as measured. The line below the predicted ops is a "
            "critical path: whatever takes longer on it makes the iteration longer."
        ),
        markup.figure(
            drawings["timeline"],
            "Numbers are microbatches. A measured gradient sync includes its wait for the other stages. "
            f"Vertical lines end the iteration, overhead included. {caption(run)}.",
            "timeline.png",
            wide=True,
        ),
    )


def time(run: RunData, drawings: Mapping[str, str], op_rows: Sequence[OpTime]) -> str:
    """Iteration time, its parts, its distribution, and single ops."""
    compute = [row for row in op_rows if row.kind in ("forward", "backward")]
    return markup.section(
        "time",
        "Where the time goes",
        markup.paragraph(
            "Every error is predicted / measured − 1: a plus means that the prediction was too high. "
            f"Measured numbers are medians of n; the parts are medians of {run.measured.iterations_timed} "
            "iterations each and need not add up to the median iteration."
        ),
        markup.columns(
            markup.figure(drawings["iteration_time"], f"{caption(run)}.", "iteration_time.png"),
            markup.figure(
                drawings["iteration_distribution"],
                f"All timed iterations; the axis does not start at zero. {caption(run)}.",
                "iteration_distribution.png",
            ),
        ),
        markup.columns(
            markup.table(tables.comparison_words(time_quantities(run)), caption="Whole iteration"),
            markup.table(tables.ops_words(compute), caption="Forward and backward of one microbatch"),
        ),
    )


def memory(run: RunData, drawings: Mapping[str, str]) -> str:
    """Peak bytes per stage and what the predicted peak consists of."""
    return markup.section(
        "memory",
        "What the memory holds",
        markup.paragraph(
            "State is parameters, gradients and optimizer. Activations are kept by microbatches in flight. "
            "Transient is what the op that runs at the peak needs besides."
        ),
        markup.columns(
            markup.figure(drawings["memory"], f"{caption(run)}.", "memory.png"),
            markup.table(tables.comparison_words(memory_quantities(run)), caption="Peaks, one run")
            + markup.table(tables.memory_words(run), caption="Parts of the predicted peak"),
        ),
    )


def losses(run: RunData, drawings: Mapping[str, str]) -> str:
    """Loss curves against the unigram entropy."""
    return markup.section(
        "losses",
        "What every exit has learnt",
        markup.paragraph(
            "Below the unigram entropy an exit has learnt more than how frequent each token is; at it, no "
            "more than that. Losses are in nats per token."
        ),
        markup.columns(
            markup.figure(drawings["losses"], f"{caption(run)}.", "losses.png"),
            markup.table(tables.losses_words(run), caption="First and last loss of each exit"),
            kind="uneven",
        ),
    )


def exits(run: RunData, drawings: Mapping[str, str]) -> str:
    """Where the exits are and what they cost, as predicted."""
    prediction, stages = run.plan.prediction, run.plan.stages
    added_s = prediction.iteration_time_s - prediction.baseline_iteration_time_s
    work_s = run.plan.num_microbatches * sum(stage.exit_s for stage in stages)
    cost = (
        f"Predicted: {words.seconds(prediction.iteration_time_s)} per iteration with exits, "
        f"{words.seconds(prediction.baseline_iteration_time_s)} without "
        f"({words.signed_percent(prediction.time_overhead)}). Summed over stages the exits compute for "
        f"{words.seconds(work_s)} per iteration, which makes it {words.seconds(added_s)} longer"
    )
    cost += "; the rest runs while a stage would wait." if work_s > added_s else "."
    return markup.section(
        "exits",
        "Where the exits are, and what they cost",
        markup.paragraph(cost if run.plan.exits else "This plan has no early exit, so nothing is added."),
        markup.figure(
            drawings["layout"], f"Layers in pipeline order. {caption(run)}.", "layout.png", wide=True
        ),
        markup.columns(
            markup.table(tables.exits_words(run.plan), caption="Exits") if run.plan.exits else "",
            (
                markup.table(tables.comparison_words(timed), caption="Each exit, one microbatch")
                if (timed := exit_quantities(run))
                else ""
            )
            + markup.table(tables.stages_words(run.plan), caption="One microbatch on each stage, predicted"),
        ),
    )


def samples(run: RunData) -> str:
    """Generated text, each token marked by the exit that emitted it; empty without samples."""
    if not run.samples:
        return ""
    marks: dict[str, int | None] = {name: i for i, name in enumerate(run.loss_names[:-1])}
    marks["final"] = None
    counts = Counter(token.exit for sample in run.samples for token in sample.tokens)
    total = counts.total()
    legend = [
        markup.swatch(marks[name], f"{name}  {words.percent(counts[name] / max(total, 1), 0)}")
        for name in run.loss_names
    ]
    return markup.section(
        "samples",
        "Text generated with early exits",
        markup.paragraph(
            f"Each of {words.plural(total, 'token')} is marked by the exit that emitted it; unmarked ones "
            "went through the whole model. Prompts are grey."
        ),
        f'<div class="legend">{"".join(legend)}</div>',
        *(_sample(sample, marks, run.plan.run.model.num_layers) for sample in run.samples),
    )


def _sample(sample: Sample, marks: Mapping[str, int | None], num_layers: int) -> str:
    tokens = "".join(
        f'<span class="{markup.mark(marks[token.exit])}" '
        f'title="{token.exit}, confidence {token.confidence:.2f}">{escape(text)}</span>'
        for token, text in zip(sample.tokens, _visible([t.text for t in sample.tokens]), strict=True)
    )
    depths = [num_layers if t.exit == "final" else int(t.exit.removeprefix("exit_")) for t in sample.tokens]
    notes = [f"threshold {sample.threshold:g}", words.plural(len(sample.tokens), "token")]
    if depths:
        mean = sum(depths) / len(depths)
        notes.append(f"emitted after {mean:.1f} of {num_layers} layers on average")
    if sample.tokens_per_s is not None:
        notes.append(f"{words.number(sample.tokens_per_s)} tokens/s")
    return (
        f'<div class="sample"><pre><span class="prompt">{escape(sample.prompt)}</span>{tokens}</pre>'
        f"{markup.paragraph('; '.join(notes))}</div>"
    )


def _visible(texts: Sequence[str]) -> list[str]:
    """Tokens with line ends shown; of several in a row only the first breaks the line, to save paper."""
    shown, at_start = [], False
    for text in texts:
        line = ""
        for character in text:
            if character == "\n":
                line += _LINE_END if at_start else f"{_LINE_END}\n"
            else:
                line += character
            at_start = character == "\n"
        shown.append(line)
    return shown


def plan(plan: Plan) -> str:
    """Decisions with their reasons, how far the search is proved, and what was not measured."""
    certificate = plan.certificate
    space = words.plural(certificate.space_size, "candidate")
    proof = (
        f"the proven best of {space}" if certificate.optimal else f"the best found among {space}, unproven"
    )
    return markup.section(
        "plan",
        "What was decided, and why",
        markup.paragraph(
            f"This placement is {proof}: {certificate.evaluated:,} were evaluated, {certificate.pruned:,} "
            "groups ruled out by a lower bound."
        ),
        markup.table(tables.decisions_words(plan), "prose") if plan.decisions else "",
        markup.paragraph(
            "Ops whose cost was extrapolated instead of measured: "
            f"{', '.join(plan.extrapolated_ops) or 'none'}. Interpolated between measured microbatch sizes: "
            f"{', '.join(plan.interpolated_ops) or 'none'}.",
            "after",
        ),
    )


def origin(run: RunData, out: Path) -> str:
    """The commands that make this page again, and the hashes of what went in."""
    folder, plan = run.path.name or "DIR", run.plan
    lines = [
        "eeplan profile run.yaml -o profile.yaml",
        "eeplan plan run.yaml --profile profile.yaml -o plan.yaml",
        f"eeplan train plan.yaml --out {folder}",
    ]
    for sample in run.samples[:1]:
        lines.append(
            f"eeplan generate {folder}/checkpoints/latest --prompt {shlex.quote(sample.prompt)} "
            f"--threshold {sample.threshold:g}"
        )
    lines.append(f"eeplan report {folder} -o {out.name or 'OUT'}")
    sentence = "The prediction was made before training, from the profile and the run file alone."
    if run.profile is not None:
        processes = words.plural(run.profile.processes, "process", "processes")
        sentence += f" The profile is of {run.profile.date[:10]}, measured with {processes} at once."
        if run.profile.disturbed_share > 0:
            share = words.percent(run.profile.disturbed_share)
            sentence += f" Other work on the machine disturbed {share} of its samples."
    if run.measured.core_share is not None:
        shares = ", ".join(words.percent(share) for share in run.measured.core_share)
        sentence += f" While computing, the stages had a core for themselves {shares} of the time."
    return markup.section(
        "origin",
        "How to make this page again",
        markup.paragraph(sentence),
        markup.commands(lines),
        "<footer>"
        + escape(
            f"eeplan {plan.eeplan_version} · run {plan.run_sha256[:12]} · profile {plan.profile_sha256[:12]} "
            f"· plan {plan.content_sha256[:12]} · seed {plan.run.training.seed}. Numbers: summary.json, "
            "comparison.csv, ops.csv, timeline.csv. trace.json opens in Perfetto."
        )
        + "</footer>",
    )
