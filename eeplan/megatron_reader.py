"""From the flags of a Megatron-LM or EE-LLM launch script to a run file.

Every flag is either taken over, or known to have no bearing on a plan (logging, saving, kernels), or listed
as not understood with the reason. What the script leaves to Megatron's defaults is filled in from them, not
from eeplan's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eeplan.errors import SpecError
from eeplan.megatron_flags import FIELDS, LLAMA_FLAGS, parse_layout, plain_slot
from eeplan.megatron_scale_flags import read_scale
from eeplan.megatron_tables import DEFAULTS, IRRELEVANT_PREFIXES, TOKENIZER_SIZES, UNSUPPORTED
from eeplan.schema import validate
from eeplan.script_flags import FlagReader, Unread, flags_of
from eeplan.shell_words import Command, launch_command
from eeplan.sim.layout import Layout, layout_of
from eeplan.spec import HeadKind, RunSpec


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What a launch script says."""

    run: RunSpec
    not_understood: tuple[Unread, ...]
    assumed: tuple[str, ...]
    """Values that the script leaves open, and what was taken."""


def read_script(
    text: str, where: str, defined: Mapping[str, str] | None = None, vocab_size: int | None = None
) -> ScriptRun:
    """Read a launch script.

    Args:
        text: shell script that starts Megatron-LM or EE-LLM, or its flags alone.
        where: names the script in errors.
        defined: values of shell variables that the script does not set.
        vocab_size: where neither the script nor its tokenizer's type says it.

    Raises:
        SchemaError: no flags found, or the run they describe is impossible.
        SpecError: a needed flag is missing or not a number.
    """
    command = launch_command(text, where, defined)
    reader = FlagReader(flags_of(command.arguments), where)
    document: dict[str, Any] = {"schema_version": 1, "name": "from_script"}
    _read_fields(reader, document)
    _read_model(reader, document, vocab_size)
    _read_parallel(reader, document, command)
    _read_lengths(reader, document["training"])
    bare = validate(document, RunSpec, where)
    document |= _read_exits(reader, layout_of(bare))
    document |= _read_fill(reader)
    run = validate(document, RunSpec, where)
    _sort_rest(reader, run)
    return ScriptRun(run, tuple(reader.unread), tuple(reader.assumed))


def _read_fields(reader: FlagReader, document: dict[str, Any]) -> None:
    for section in ("model", "parallel", "training", "data"):
        document[section] = {}
    for flag, path, kind in FIELDS:
        section, key = path.split(".")
        # The batch needs the number of ranks, data paths may be several.
        if section == "data" or key == "global_batch_size":
            continue
        value = reader.number(flag, kind)
        if value is None and flag in DEFAULTS:
            value = kind(DEFAULTS[flag])
        if value is not None:
            document[section][key] = value
    for flag, path, _ in FIELDS:
        section, key = path.split(".")
        known = section == "data" or key in ("ffn_hidden_size", "global_batch_size", *document[section])
        if not known and not (key == "train_iters" and "--train-samples" in reader.flags):
            raise SpecError(
                f"{reader.where}: no {flag} among the flags of the training command; a run file needs it"
            )
    read_scale(reader, document)
    _read_data(reader, document)


def _read_data(reader: FlagReader, document: dict[str, Any]) -> None:
    paths = reader.take("--data-path") or reader.take("--train-data-path") or ()
    data_path = _data_path(paths)
    if paths and data_path is None:
        reader.unread.append(
            Unread("--data-path", paths, "expected one prefix, or weights and prefixes in turn")
        )
    if not paths:
        reader.assumed.append("data.data_path data/text: the script names no data")
    tokenizer = reader.one("--tokenizer-model") or reader.one("--vocab-file")
    if tokenizer is None:
        reader.assumed.append("data.tokenizer data/text.tokenizer.json: the script names no tokenizer file")
    split = reader.take("--split")
    document["data"] = {
        "data_path": data_path or "data/text",
        "tokenizer": tokenizer or "data/text.tokenizer.json",
        "split": ",".join(part.strip() for part in " ".join(split).split(","))
        if split
        else DEFAULTS["--split"],
    }


def _data_path(words: Sequence[str]) -> str | list[dict[str, Any]] | None:
    """A prefix, or weights and prefixes in turn; None where there is neither."""
    if len(words) < 2:
        return words[0] if words else None
    weights = [float(word) for word in words[::2] if word.replace(".", "", 1).isdigit()]
    if len(words) % 2 or len(weights) != len(words) // 2:
        return None
    return [{"path": path, "weight": weight} for weight, path in zip(weights, words[1::2], strict=True)]


def _read_model(reader: FlagReader, document: dict[str, Any], vocab_size: int | None) -> None:
    model = document["model"]
    model["untie_embeddings_and_output_weights"] = reader.switch("--untie-embeddings-and-output-weights")
    groups = reader.number("--num-query-groups", int)
    grouped = reader.switch("--group-query-attention")
    model["num_query_groups"] = (groups or 1) if grouped else model["num_attention_heads"]
    gated = "--swiglu" in reader.flags
    if "ffn_hidden_size" not in model:
        hidden = model["hidden_size"]
        # Megatron's default: 4 h, or for a gated MLP two thirds of it, cut to a multiple of 64.
        model["ffn_hidden_size"] = 8 * hidden // 3 // 64 * 64 if gated else 4 * hidden
    _require_llama(reader)
    model["vocab_size"] = _vocabulary(reader, vocab_size)


def _require_llama(reader: FlagReader) -> None:
    """Report where the script's model differs from the kind that eeplan builds."""
    wanted = flags_of(LLAMA_FLAGS)
    for flag, values in wanted.items():
        given = reader.take(flag)
        if given != values:
            said = " ".join(values) or "it"
            reader.unread.append(
                Unread(flag, given or (), f"eeplan's model has {said}, the script's does not")
            )
    if reader.switch("--use-rotary-position-embeddings"):
        reader.unread = [one for one in reader.unread if one.flag != "--position-embedding-type"]


def _vocabulary(reader: FlagReader, vocab_size: int | None) -> int:
    kind = (reader.flags.get("--tokenizer-type") or ("",))[0]
    said = reader.number("--vocab-size", int)
    padded = reader.number("--padded-vocab-size", int)
    if vocab_size is not None:
        return vocab_size
    if said is not None:
        # This tokenizer counts an end-of-document token on top of what it is told.
        return int(said) + (kind == "NullTokenizer")
    if padded is not None:
        return int(padded)
    if kind in TOKENIZER_SIZES:
        size = TOKENIZER_SIZES[kind]
        reader.assumed.append(f"model.vocab_size {size}: usual for {kind}; give --vocab-size otherwise")
        return size
    raise SpecError(f"{reader.where}: the script does not say the size of the vocabulary; add --vocab-size")


def _read_parallel(reader: FlagReader, document: dict[str, Any], command: Command) -> None:
    parallel, training = document["parallel"], document["training"]
    stages = parallel["pipeline_model_parallel_size"]
    layout = reader.one("--pipeline-model-parallel-layout")
    if layout is not None:
        split = parse_layout(layout).layers_per_stage
        if len(split) != stages:
            raise SpecError(
                f"{reader.where}: --pipeline-model-parallel-layout has {len(split)} stages, "
                f"--pipeline-model-parallel-size is {stages}; make them agree"
            )
        parallel["layer_split"] = "uniform" if len(set(split)) == 1 else list(split)
    model_parallel = stages * parallel["tensor_model_parallel_size"]
    started = _ranks(reader, command)
    if started is not None:
        per_node, nodes = started
        world = per_node * nodes
        if nodes > 1 and per_node % parallel["tensor_model_parallel_size"] == 0:
            parallel["gpus_per_node"] = per_node
    else:
        world = model_parallel
        reader.assumed.append(
            f"parallel.data_parallel_size 1: the script does not say that it starts {world} ranks"
        )
    if world % model_parallel:
        raise SpecError(
            f"{reader.where}: {world} ranks are not divisible by pipeline x tensor parallel size "
            f"{model_parallel}; correct --nproc_per_node or --nnodes"
        )
    parallel["data_parallel_size"] = world // model_parallel
    given = reader.take("--global-batch-size")
    per_step = training["micro_batch_size"] * parallel["data_parallel_size"]
    training["global_batch_size"] = reader.parsed("--global-batch-size", given[0], int) if given else per_step


def _read_lengths(reader: FlagReader, training: dict[str, Any]) -> None:
    """A training given in samples, a warm-up given as a fraction, and a decay that ends with the training."""
    samples = reader.number("--train-samples", int)
    if samples is not None:
        training.setdefault("train_iters", samples // training["global_batch_size"])
    decay = training["train_iters"]
    if "--lr-decay-iters" in reader.flags:
        given = reader.number("--lr-decay-iters", int)
        if given != decay:
            reader.unread.append(Unread("--lr-decay-iters", (str(given),), UNSUPPORTED["--lr-decay-iters"]))
        decay = given
    fraction = reader.number("--lr-warmup-fraction", float)
    if fraction is not None:
        training["lr_warmup_iters"] = int(fraction * decay)


def _ranks(reader: FlagReader, command: Command) -> tuple[int, int] | None:
    """Ranks per node and nodes, as far as the launcher's flags say."""
    flags = {name.replace("-", "_"): values for name, values in flags_of(command.launcher).items()}
    sizes = []
    for name in ("__nproc_per_node", "__nnodes"):
        values = flags.get(name)
        if not values:
            # torchrun starts one node unless told otherwise.
            if name == "__nnodes":
                continue
            return None
        if "$" in values[0]:
            return None
        sizes.append(int(reader.parsed(name.replace("_", "-"), values[0].partition(":")[0], int)))
    return sizes[0], sizes[1] if len(sizes) > 1 else 1


def _read_exits(reader: FlagReader, layout: Layout) -> dict[str, Any]:
    layers = [reader.parsed("--exit-layer-nums", t, int) for t in reader.take("--exit-layer-nums") or ()]
    weights = _floats(reader, "--exit-layer-weight") or [1.0] * len(layers)
    inits = _floats(reader, "--exit-layer-weight-init") or [0.0] * len(layers)
    iters = reader.number("--exit-layer-weight-warmup-iters", int) or 0
    style = reader.one("--exit-layer-weight-warmup-style") or "linear"
    before, untied = reader.switch("--pre-exit"), reader.switch("--untie-exit-output-weights")
    head = _head_kind(reader)
    _note_temperature(reader)
    if not layers:
        return {}
    for flag, values in (("--exit-layer-weight", weights), ("--exit-layer-weight-init", inits)):
        if len(values) != len(layers):
            raise SpecError(f"{reader.where}: {flag} has {len(values)} values for {len(layers)} exits")
    requests = []
    for layer, weight in sorted(zip(layers, weights, strict=True)):
        depth = layer - before
        if not 1 <= depth < layout.num_layers:
            raise SpecError(
                f"{reader.where}: --exit-layer-nums {layer}{' with --pre-exit' * before} reads after "
                f"{depth} of {layout.num_layers} layers; expected 1 to {layout.num_layers - 1}"
            )
        slot = plain_slot(layout, layer, "before" if before else "after")
        requests.append(
            {
                "layer": slot.layer,
                "boundary": slot.boundary,
                "head": head,
                "tied": not untied,
                "weight": weight,
            }
        )
    warmup = _warmup(reader, weights, inits, iters, style)
    exits: dict[str, Any] = {"layers": requests, "exit_forward": "deferred"}
    return {"exits": exits | ({"loss_weights": {"warmup": warmup}} if warmup else {})}


def _floats(reader: FlagReader, flag: str) -> list[float]:
    return [reader.parsed(flag, text, float) for text in reader.take(flag) or ()]


def _head_kind(reader: FlagReader) -> HeadKind:
    norm = reader.switch("--use-exit-norm")
    mlp, block = reader.take("--use-exit-mlp"), reader.take("--use-exit-block")
    if mlp is not None and block is not None:
        reader.unread.append(
            Unread("--use-exit-mlp", mlp, "an MLP and a block in one head; the block is taken")
        )
    if (mlp is not None or block is not None) and not norm:
        flag = "--use-exit-block" if block is not None else "--use-exit-mlp"
        reader.unread.append(Unread(flag, (), "such a head without a norm; eeplan's has one"))
    if block is not None:
        return "block"
    if mlp is not None:
        return "mlp"
    return "norm" if norm else "minimal"


def _note_temperature(reader: FlagReader) -> None:
    temperatures = reader.take("--exit-layer-temperature")
    if temperatures and any(text not in ("1", "1.0") for text in temperatures):
        reader.unread.append(Unread("--exit-layer-temperature", temperatures, "temperature of exit losses"))


def _warmup(
    reader: FlagReader, weights: Sequence[float], inits: Sequence[float], iters: int, style: str
) -> dict[str, Any] | None:
    """The schedule of the loss weights: one factor for all exits."""
    if not iters:
        return None
    factors = [init / weight for init, weight in zip(inits, weights, strict=True) if weight]
    if not factors:
        return None
    factor = factors[0]
    if any(abs(other - factor) > 1e-9 * max(1.0, abs(factor)) for other in factors):
        reader.unread.append(
            Unread(
                "--exit-layer-weight-init",
                tuple(map(str, inits)),
                f"starts that are not the same share of all weights; {factor:g} is taken for all",
            )
        )
    return {"style": style, "init": factor, "iters": iters}


def _read_fill(reader: FlagReader) -> dict[str, Any]:
    filling = reader.switch("--fill-explicit-bubbles")
    warmup = reader.number("--num-fill-warmup-microbatches", int)
    cooldown = reader.number("--num-fill-cooldown-microbatches", int)
    if not filling:
        return {}
    if warmup is None or cooldown is None:
        reader.assumed.append("fill.policy auto: the script leaves the number of partial microbatches open")
        return {"fill": {"policy": "auto", "mode": "same_count"}}
    return {"fill": {"policy": {"warmup": warmup, "cooldown": cooldown}, "mode": "same_count"}}


def _sort_rest(reader: FlagReader, run: RunSpec) -> None:
    """Flags that nobody took: saying what holds anyway, irrelevant, not supported, or unknown."""
    holds = {"--rotary-percent": 1.0, "--kv-channels": float(run.model.head_dim)}
    for flag, values in reader.flags.items():
        if flag in holds and len(values) == 1 and reader.parsed(flag, values[0], float) == holds[flag]:
            continue
        if flag in UNSUPPORTED:
            reader.unread.append(Unread(flag, values, UNSUPPORTED[flag]))
        elif not flag.startswith(IRRELEVANT_PREFIXES):
            reader.unread.append(Unread(flag, values, "unknown to eeplan"))
