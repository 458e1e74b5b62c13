"""The Megatron-LM command line that equals a plan, with EE-LLM's flags for its exits.

Names and defaults are those of Megatron-LM's ``arguments.py``; the exit flags those of EE-LLM, whose limits
(one head kind, one boundary, equal stages) end in notes where a plan goes beyond them. ``megatron_reader``
reads the same flags back.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from eeplan.errors import SpecError
from eeplan.megatron_scale_flags import launcher_words, said_by_launcher, scale_words
from eeplan.plan import Plan
from eeplan.sim.layout import Layout, Slot, layout_of
from eeplan.spec import (
    ExitRequest,
    ExitsSpec,
    FillCounts,
    FillSpec,
    HeadKind,
    LossWeightSpec,
    RunSpec,
)

Trainer = Literal["megatron", "ee-llm"]
"""Whose flags: stock Megatron-LM knows no exits, EE-LLM no pipeline layout."""
PROGRAMS: dict[Trainer, str] = {"megatron": "pretrain_gpt.py", "ee-llm": "pretrain_early_exit_gpt.py"}

FIELDS: tuple[tuple[str, str, type[int] | type[float] | type[str]], ...] = (
    ("--num-layers", "model.num_layers", int),
    ("--hidden-size", "model.hidden_size", int),
    ("--ffn-hidden-size", "model.ffn_hidden_size", int),
    ("--num-attention-heads", "model.num_attention_heads", int),
    ("--make-vocab-size-divisible-by", "model.make_vocab_size_divisible_by", int),
    ("--rotary-base", "model.rotary_base", int),
    ("--norm-epsilon", "model.layernorm_epsilon", float),
    ("--init-method-std", "model.init_method_std", float),
    ("--pipeline-model-parallel-size", "parallel.pipeline_model_parallel_size", int),
    ("--tensor-model-parallel-size", "parallel.tensor_model_parallel_size", int),
    ("--micro-batch-size", "training.micro_batch_size", int),
    ("--global-batch-size", "training.global_batch_size", int),
    ("--seq-length", "training.seq_length", int),
    ("--train-iters", "training.train_iters", int),
    ("--hidden-dropout", "training.hidden_dropout", float),
    ("--attention-dropout", "training.attention_dropout", float),
    ("--seed", "training.seed", int),
    ("--lr", "training.lr", float),
    ("--min-lr", "training.min_lr", float),
    ("--lr-warmup-iters", "training.lr_warmup_iters", int),
    ("--lr-decay-style", "training.lr_decay_style", str),
    ("--weight-decay", "training.weight_decay", float),
    ("--adam-beta1", "training.adam_beta1", float),
    ("--adam-beta2", "training.adam_beta2", float),
    ("--adam-eps", "training.adam_eps", float),
    ("--clip-grad", "training.clip_grad", float),
    ("--log-interval", "training.log_interval", int),
    ("--eval-iters", "training.eval_iters", int),
    ("--data-path", "data.data_path", str),
    ("--tokenizer-model", "data.tokenizer", str),
    ("--split", "data.split", str),
)
"""Flags that say the same as one field of a run file."""

LLAMA_FLAGS = (
    *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    "--disable-bias-linear",
)
"""What every model of eeplan is, and Megatron's default is not."""

HEAD_FLAGS: dict[HeadKind, tuple[str, ...]] = {
    "minimal": (),
    "norm": ("--use-exit-norm",),
    "mlp": ("--use-exit-norm", "--use-exit-mlp"),
    "block": ("--use-exit-norm", "--use-exit-block"),
}

_UNROLLED = re.compile(r"\(([^()]+)\)\*([0-9]+)|(.)\*([0-9]+)")
_LONGEST_LAYOUT = 100_000
"""Characters; a repetition with a mistyped count must not fill the memory."""


@dataclass(frozen=True, slots=True)
class MegatronFlags:
    """A plan as command-line words."""

    launcher: tuple[str, ...]
    """torchrun's own flags."""
    megatron: tuple[str, ...]
    layout: tuple[str, ...]
    """The layer split, which EE-LLM does not know."""
    exits: tuple[str, ...]
    """EE-LLM's flags, which stock Megatron-LM does not know."""
    notes: tuple[str, ...]
    """What these flags cannot say."""

    def words(self, trainer: Trainer) -> tuple[str, ...]:
        """Arguments of the training program."""
        return (*self.megatron, *(self.exits if trainer == "ee-llm" else self.layout))

    def script(self, trainer: Trainer) -> str:
        """A launch script, one flag per line."""
        launch = " ".join(["torchrun", *map(shlex.quote, self.launcher), PROGRAMS[trainer]])
        notes = "".join(f"# Not said by these flags: {note}\n" for note in self.notes)
        lines = [launch, *_one_flag_a_line(self.words(trainer))]
        return "#!/bin/bash\n" + notes + " \\\n    ".join(lines) + "\n"


def flags_of_plan(plan: Plan) -> MegatronFlags:
    """Flags that train the plan's model in the plan's layout."""
    run = concrete_run(plan)
    layout = layout_of(run)
    exits, notes = _exit_flags(run, layout)
    fill, fill_notes = _fill_flags(run)
    return MegatronFlags(
        launcher=launcher_words(run.parallel),
        megatron=_megatron_flags(run),
        layout=("--pipeline-model-parallel-layout", layout_string(layout)),
        exits=(*exits, *fill),
        notes=(*notes, *fill_notes),
    )


def concrete_run(plan: Plan) -> RunSpec:
    """The plan's run with every decision written out: exits at their places, fill counts, a head for each.

    What flags cannot carry is left at its default: name, limits, decoding, what a search was allowed.
    """
    layout, run = layout_of(plan.run), plan.run
    requests = tuple(
        ExitRequest(
            layer=slot.layer,
            boundary=slot.boundary,
            head=planned.head,
            tied=planned.tied,
            weight=planned.target_weight,
            temperature=_unless_one(run.exits.temperature_at(planned.depth)),
        )
        for planned in plan.exits
        for slot in (plain_slot(layout, planned.layer, planned.boundary),)
    )
    fill = FillSpec()
    if plan.fill is not None:
        counts = FillCounts(warmup=plan.fill.warm_up, cooldown=plan.fill.cool_down)
        fill = FillSpec(policy=counts, mode=plan.fill.mode)
    model = run.model.model_copy(
        update={"ffn_hidden_size": run.model.ffn_size, "num_query_groups": run.model.query_groups}
    )
    asked = run.exits
    weights = LossWeightSpec(warmup=asked.loss_weights.warmup, dynamic=asked.loss_weights.dynamic)
    split = "uniform" if _is_uniform(layout) else layout.layers_per_stage
    return RunSpec(
        schema_version=1,
        model=model,
        parallel=said_by_launcher(run.parallel).model_copy(update={"layer_split": split}),
        training=run.training,
        data=run.data,
        exits=ExitsSpec(
            layers=requests,
            exit_forward=plan.exit_forward,
            loss_weights=weights,
            distillation=asked.distillation,
        )
        if requests
        else ExitsSpec(),
        fill=fill,
    )


def _unless_one(temperature: float) -> float | None:
    return None if temperature == 1.0 else temperature


def plain_slot(layout: Layout, layer: int, boundary: str) -> Slot:
    """The slot of an exit in the planner's words: ``before`` only at the start of a stage."""
    stage = layout.stage_of_layer(layer)
    depth = layer if boundary == "after" else layer - 1
    return next(slot for slot in layout.slots(stage) if slot.depth == depth)


def layout_string(layout: Layout) -> str:
    """Megatron's ``--pipeline-model-parallel-layout``: E embedding, t layer, L loss, | between stages.

    >>> layout_string(Layout((3, 4, 4, 3)))
    'Et*3|t*4|t*4|t*3,L'
    """
    stages = [f"t*{count}" if count > 1 else "t" for count in layout.layers_per_stage]
    return f"E{'|'.join(stages)},L"


def parse_layout(text: str) -> Layout:
    """Read a layout string, with Megatron's repetitions ``x*n`` and ``(xy)*n``.

    Raises:
        SpecError: not a layout of layers between one embedding and one loss.
    """
    plain = text.replace(",", "").replace(" ", "")
    while match := _UNROLLED.search(plain):
        part, count = match[1] or match[3], match[2] or match[4]
        # Digits first: Python refuses to read a number of thousands of them.
        if len(count) > 6 or len(plain) + len(part) * int(count) > _LONGEST_LAYOUT:
            raise SpecError(f"pipeline layout {text[:40]!r} is longer than any model; correct its counts")
        plain = plain[: match.start()] + part * int(count) + plain[match.end() :]
    stages = plain.split("|")
    if not (stages[0].startswith("E") and stages[-1].endswith("L")):
        raise SpecError(
            f"pipeline layout {text!r}: expected the embedding E first and the loss L last, as in "
            "'Et*3|t*3,L'"
        )
    stages[0] = stages[0][1:]
    stages[-1] = stages[-1][:-1]
    for stage in stages:
        if not stage or set(stage) != {"t"}:
            raise SpecError(
                f"pipeline layout {text!r} has a stage {stage!r}; expected at least one layer t on each, "
                "and nothing else"
            )
    return Layout(tuple(map(len, stages)))


def get_field(document: dict[str, Any], path: str) -> Any:
    """Value at a dotted path of a dumped run."""
    for key in path.split("."):
        document = document[key]
    return document


def _megatron_flags(run: RunSpec) -> tuple[str, ...]:
    document = run.model_dump(mode="json")
    words: list[str] = []
    for flag, path, _ in FIELDS:
        words += (
            (flag, *_data_words(run))
            if path == "data.data_path"
            else (flag, _text(get_field(document, path)))
        )
    words += LLAMA_FLAGS
    words += ("--max-position-embeddings", str(run.training.seq_length))
    # This tokenizer counts an end-of-document token on top of what it is told.
    words += ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(run.model.vocab_size - 1))
    if run.model.query_groups != run.model.num_attention_heads:
        words += ("--group-query-attention", "--num-query-groups", str(run.model.query_groups))
    if run.model.untie_embeddings_and_output_weights:
        words.append("--untie-embeddings-and-output-weights")
    return (*words, *scale_words(run))


def _data_words(run: RunSpec) -> tuple[str, ...]:
    """One prefix, or weights and prefixes in turn."""
    if isinstance(run.data.data_path, str):
        return (run.data.data_path,)
    return tuple(word for one in run.data.data_path for word in (_text(one.weight), one.path))


def _exit_flags(run: RunSpec, layout: Layout) -> tuple[list[str], list[str]]:
    requests = run.exits.layers
    if not requests:
        return [], []
    reads_before, notes = _one_boundary(requests, layout)
    layers = [request.depth + reads_before for request in requests]
    kinds = [request.head for request in requests if request.head is not None]
    weights = [request.weight or 0.0 for request in requests]
    words = ["--exit-layer-nums", *map(str, layers), "--exit-layer-weight", *map(_text, weights)]
    words += HEAD_FLAGS[kinds[0]]
    untied = [not request.tied for request in requests]
    if untied[0]:
        words.append("--untie-exit-output-weights")
    if reads_before:
        words.append("--pre-exit")
    warmup = run.exits.loss_weights.warmup
    if warmup is not None:
        words += ("--exit-layer-weight-warmup-iters", str(warmup.iters))
        words += ("--exit-layer-weight-warmup-style", warmup.style)
        words += ("--exit-layer-weight-init", *(_text(warmup.init * weight) for weight in weights))
    if len(set(kinds)) > 1:
        notes.append(f"heads of kinds {', '.join(kinds)}; EE-LLM gives all exits one kind, here {kinds[0]}")
    if len(set(untied)) > 1:
        notes.append("some matrices tied and some not; EE-LLM ties all or none")
    if not untied[0] and run.model.untie_embeddings_and_output_weights:
        notes.append("exits tied to the output matrix of a model that unties it; EE-LLM refuses that")
    if kinds[0] == "mlp" and reads_before:
        notes.append("an MLP head that reads before a layer; EE-LLM refuses that")
    if run.exits.exit_forward == "eager":
        notes.append("exit forwards in the forward step; EE-LLM always defers them to the backward")
    notes += _loss_notes(run.exits)
    last = layout.num_stages - 1
    if last and any(layout.stage_of_layer(layer) == last for layer in layers):
        notes.append("an exit on the last stage; EE-LLM fails on that")
    if not _is_uniform(layout):
        notes.append(
            f"stages of {', '.join(map(str, layout.layers_per_stage))} layers; EE-LLM makes all equal"
        )
    return words, notes


def _loss_notes(exits: ExitsSpec) -> list[str]:
    """What early losses are beside weighted cross entropies."""
    notes = []
    if any(exits.temperature_at(request.depth) != 1.0 for request in exits.layers):
        notes.append("temperatures of the exits' losses")
    if exits.loss_weights.dynamic:
        notes.append("tokens weighed by the exit's confidence")
    if exits.distillation is not None:
        notes.append("exits distilled from the final one")
    return notes


def _one_boundary(requests: Sequence[ExitRequest], layout: Layout) -> tuple[bool, list[str]]:
    """Whether all exits are said to read before a layer; inside a stage it is the same either way."""
    if all(request.boundary == "after" for request in requests):
        return False, []
    moved = [
        request.layer
        for request in requests
        if request.boundary == "after" and request.layer == layout.last_layer(layout.stage_of(request))
    ]
    notes = [
        f"the exit after layer {layer}, at the end of its stage, moves to the start of the next: EE-LLM "
        "reads all exits before a layer or all after one"
        for layer in moved
    ]
    return True, notes


def _fill_flags(run: RunSpec) -> tuple[list[str], list[str]]:
    counts = run.fill.policy
    if not isinstance(counts, FillCounts):
        return [], []
    if run.fill.mode == "added":
        return [], [
            f"{counts.warmup} + {counts.cooldown} partial microbatches on top of the global batch; EE-LLM "
            "only makes some of the batch partial"
        ]
    words = ["--fill-explicit-bubbles", "--num-fill-warmup-microbatches", str(counts.warmup)]
    words += ("--num-fill-cooldown-microbatches", str(counts.cooldown))
    return words, [
        "loss weights and gradients corrected for the partial microbatches; EE-LLM corrects nothing"
    ]


def _is_uniform(layout: Layout) -> bool:
    return len(set(layout.layers_per_stage)) == 1


def _text(value: object) -> str:
    # repr of a float is the shortest text that reads back as the same number.
    return repr(value) if isinstance(value, float) else str(value)


def _one_flag_a_line(words: Iterable[str]) -> list[str]:
    lines: list[str] = []
    for is_flag, group in groupby(words, key=lambda word: word.startswith("--")):
        if is_flag:
            lines += group
        else:
            lines[-1] += " " + " ".join(map(shlex.quote, group))
    return lines
