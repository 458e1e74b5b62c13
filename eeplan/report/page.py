"""The page as a whole: headline, what ran where, and the sections in order. Writes no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from eeplan.report import markup, sections, sections_insight, words
from eeplan.report.compare import OpTime, learnt, signed_error
from eeplan.report.css import style_sheet
from eeplan.report.replan import Comparison, NoPlan
from eeplan.report.rundir import RunData


def headline(run: RunData) -> tuple[str, str]:
    """Predicted and measured iteration time in words, and the signed error."""
    predicted, measured = run.plan.prediction.iteration_time_s, run.measured.iteration_time_s
    unit = words.time_unit(max(predicted, measured))
    text = (
        f"Predicted {words.seconds(predicted, unit)} per iteration, measured {words.seconds(measured, unit)}"
    )
    return text, words.signed_percent(signed_error(predicted, measured))


def render(
    run: RunData,
    drawings: Mapping[str, str],
    op_rows: Sequence[OpTime],
    shown_iteration: int,
    out: Path,
    comparison: Comparison | NoPlan | None = None,
) -> str:
    """The whole page.

    Args:
        drawings: inline SVG per figure name (``timeline``, ``iteration_time``, …).
        op_rows: from ``compare.op_times``.
        shown_iteration: number of the iteration whose timeline is drawn.
        out: where the page goes, for the command that reproduces it.
        comparison: with another plan, or with what the planner would decide now.
    """
    text, error = headline(run)
    body = (
        _header(run),
        sections.timeline(run, drawings, shown_iteration),
        sections.time(run, drawings, op_rows),
        sections_insight.stages(run, drawings),
        sections.memory(run, drawings),
        sections.losses(run, drawings),
        sections.exits(run, drawings),
        sections_insight.decoding(run, drawings),
        sections.samples(run),
        sections.plan(run.plan),
        sections_insight.replanned(comparison),
        sections.origin(run, out),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(f'{text} ({error})')}</title>\n<style>\n{style_sheet()}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(part for part in body if part) + "\n</main>\n</body>\n</html>\n"
    )


def _header(run: RunData) -> str:
    text, error = headline(run)
    return "\n".join(
        (
            "<header>",
            markup.paragraph(f"eeplan report · {run.plan.run.name}", "kicker"),
            f'<h1>{escape(text)} <span class="error">({escape(error)})</span></h1>',
            markup.paragraph(_memory_sentence(run), "standfirst"),
            markup.paragraph(_loss_sentence(run), "standfirst"),
            markup.definitions(_facts(run)),
            "</header>",
        )
    )


def _memory_sentence(run: RunData) -> str:
    errors = [
        f"stage {i} {words.signed_percent(signed_error(s.memory.peak_bytes, run.measured.peak_bytes[i]))}"
        for i, s in enumerate(run.plan.stages)
    ]
    return (
        f"Peak memory, predicted against measured: {words.listing(errors)}. "
        "A minus means that the prediction was too low."
    )


def _loss_sentence(run: RunData) -> str:
    if run.unigram_entropy_nats is None:
        return "The run holds no unigram entropy of its text to compare the losses with."
    passed = [name for name in run.loss_names if learnt(run, name)]
    missed = [name for name in run.loss_names if name not in passed]
    limit = f"the unigram entropy of the text ({run.unigram_entropy_nats:.2f} nats)"
    after = f"After {words.plural(run.train[-1].iteration, 'iteration')}"
    if not missed:
        return f"{after} the loss of every exit is below {limit}."
    if not passed:
        return f"{after} the loss of no exit is below {limit}."
    verb = "is" if len(passed) == 1 else "are"
    return f"{after} {words.listing(passed)} {verb} below {limit}, {words.listing(missed)} not."


def _facts(run: RunData) -> list[tuple[str, str]]:
    plan, model, training = run.plan, run.plan.run.model, run.plan.run.training
    device, layout = run.measured.device, run.plan.run.parallel
    threads = words.plural(run.measured.threads, "thread")
    cores = words.plural(device.cores, "core")
    parameters = sum(stage.memory.parameters for stage in plan.stages)
    exits = [f"{e.boundary} layer {e.layer} ({e.head})" for e in sorted(plan.exits, key=lambda e: e.depth)]
    return [
        ("Hardware", f"{device.name}, {cores}, {words.size(device.memory_bytes)}"),
        (
            "Processes",
            f"{layout.world_size} = {len(plan.stages)} pipeline × {layout.tensor_model_parallel_size} tensor "
            f"× {layout.data_parallel_size} data; {threads} each",
        ),
        (
            "Model",
            f"{model.num_layers} layers, hidden {model.hidden_size:,}, {model.num_attention_heads} heads, "
            f"vocabulary {model.vocab_size:,}; {words.number(parameters / 1e6)} M parameters over all stages",
        ),
        ("Early exits", "; ".join(exits) or "none"),
        (
            "Batch",
            f"{training.global_batch_size} sequences of {training.seq_length:,} tokens in "
            f"{words.plural(plan.num_microbatches, 'microbatch', 'microbatches')} of "
            f"{training.micro_batch_size}, {training.precision}",
        ),
        ("Schedule", f"{plan.schedule.upper()}, exit forwards {plan.exit_forward}"),
        (
            "Training",
            f"{words.plural(run.train[-1].iteration, 'iteration')} in {words.seconds(run.measured.wall_s)}; "
            f"{run.measured.iterations_timed} timed",
        ),
        ("Software", ", ".join(f"{name} {version}" for name, version in run.measured.software.items())),
    ]
