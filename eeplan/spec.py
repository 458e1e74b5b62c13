"""What the user wants: the run file (run.yaml).

Model shape, parallel layout, training, data, exits and limits, in Megatron's own spelling. Nothing here is
measured (see ``profile``) or decided (see ``plan``).
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, PositiveFloat, PositiveInt, Tag, model_validator

from eeplan.errors import SpecError
from eeplan.schema import Model, load_yaml, validate
from eeplan.usage import UsagePrior

HeadKind = Literal["minimal", "norm", "mlp", "block"]
"""What stands between an exit's hidden state and its logits.

``minimal``: the vocabulary matrix alone; ``norm``: RMSNorm, matrix; ``mlp``: pre-norm residual MLP, RMSNorm,
matrix; ``block``: a whole transformer layer, RMSNorm, matrix.
"""
HEAD_KINDS: tuple[HeadKind, ...] = ("minimal", "norm", "mlp", "block")

Boundary = Literal["before", "after"]
"""Where an exit reads the hidden state: ``after`` layer l, or ``before`` layer l (EE-LLM's pre_exit)."""

ExitForward = Literal["deferred", "eager"]
"""When an exit's forward runs: inside the backward step (paper 3.2, Optimization 1) or the forward step."""
EXIT_FORWARDS: tuple[ExitForward, ...] = ("deferred", "eager")

FillMode = Literal["added", "same_count"]
"""``added``: partial microbatches on top of global_batch_size; ``same_count``: instead of full ones of it."""

DecodeMode = Literal["full", "kv_recompute", "catch_up", "pipeline"]
"""How a model is decoded (paper 4; facts 6): without early exits, or who completes a left token's keys and
values: a later forward from the first layer on, one from where the token left, or the later stages."""
DECODE_MODES: tuple[DecodeMode, ...] = ("full", "kv_recompute", "catch_up", "pipeline")

Fraction = Annotated[float, Field(ge=0.0)]


class ModelSpec(Model):
    """Shape of a Llama-like GPT (RMSNorm, RoPE, SwiGLU, no biases), in Megatron's argument names."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt | None = None
    """Key/value heads (grouped-query attention); None means as many as attention heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the SwiGLU MLP; None means 8/3 of hidden_size rounded up to a multiple of 64."""
    vocab_size: PositiveInt
    make_vocab_size_divisible_by: PositiveInt = 128
    untie_embeddings_and_output_weights: bool = False
    rotary_base: PositiveInt = 10000
    layernorm_epsilon: PositiveFloat = 1e-5
    init_method_std: PositiveFloat = 0.02

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP, with the default filled in."""
        return self.ffn_hidden_size or -(-8 * self.hidden_size // (3 * 64)) * 64

    @property
    def query_groups(self) -> int:
        """Number of key/value heads, with the default filled in."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Channels per attention head."""
        return self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _shapes_divide(self) -> Self:
        _require_divides("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        if self.head_dim % 2:
            raise ValueError(
                f"hidden_size / num_attention_heads is {self.head_dim}; rotary embedding needs an even number"
            )
        _require_divides(
            "num_attention_heads", self.num_attention_heads, "num_query_groups", self.query_groups
        )
        return self


def _known_split(value: object) -> object:
    if value not in ("uniform", "auto"):
        raise ValueError(
            f"{value!r} is no layer split; expected uniform, auto or layers per stage as in [3, 5]"
        )
    return value


LayerSplit = Annotated[
    # Tags in brackets are not taken for keys in error messages.
    Annotated[Literal["uniform", "auto"], BeforeValidator(_known_split), Tag("[word]")]
    | Annotated[tuple[PositiveInt, ...], Tag("[layers]")],
    Discriminator(lambda value: "[layers]" if isinstance(value, list | tuple) else "[word]"),
]


class ParallelSpec(Model):
    """Parallel layout. World size is the product of the three degrees."""

    pipeline_model_parallel_size: PositiveInt = 1
    tensor_model_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    layer_split: LayerSplit = "uniform"
    """Layers of each pipeline stage; ``auto`` lets the planner choose. Embedding and final head count as none
    (Megatron's pipeline_model_parallel_layout)."""

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pipeline_model_parallel_size * self.tensor_model_parallel_size * self.data_parallel_size


class TrainingSpec(Model):
    """Batch sizes, precision, optimizer and schedule of one training run."""

    micro_batch_size: PositiveInt
    global_batch_size: PositiveInt
    seq_length: PositiveInt
    train_iters: PositiveInt
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: Annotated[int, Field(ge=1)] = 1234
    lr: PositiveFloat = 1e-3
    min_lr: Fraction = 0.0
    lr_warmup_iters: Annotated[int, Field(ge=0)] = 0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    weight_decay: Fraction = 0.1
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    adam_eps: PositiveFloat = 1e-8
    clip_grad: Fraction = 1.0
    log_interval: PositiveInt = 10
    eval_iters: PositiveInt = 4
    """Validation microbatch groups evaluated before the first and after the last iteration."""
    save_interval: PositiveInt | None = None
    """Iterations between checkpoints; None saves after the last iteration only."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints that stay on disk. With two, a damaged newest one still leaves one to go on from."""


class DataSpec(Model):
    """Training text, as built by ``eeplan data build``."""

    data_path: str
    """Prefix of the .bin/.idx pair, relative to the file that names it."""
    tokenizer: str
    """Tokenizer file written next to the data, relative to the file that names it."""
    split: str = "95,5,0"
    """Relative sizes of train, validation and test parts."""

    @model_validator(mode="after")
    def _split_is_three_numbers(self) -> Self:
        try:
            parts = [float(part) for part in self.split.split(",")]
        except ValueError:
            parts = []
        # Written so that nan, of which no comparison holds, is refused.
        if len(parts) != 3 or not (parts[0] > 0 and min(parts) >= 0 and sum(parts) < inf):
            raise ValueError(
                f"split is {self.split!r}; expected three numbers 'train,valid,test' with a positive first"
            )
        return self


class ExitRequest(Model):
    """One exit that the user placed by hand. Fields left out take the defaults of ``exits``."""

    layer: PositiveInt
    """Layer number, from 1."""
    boundary: Boundary = "after"
    head: HeadKind | None = None
    tied: bool | None = None
    weight: Fraction | None = None

    @property
    def depth(self) -> int:
        """Layers computed before this exit: ``layer`` after it, ``layer - 1`` before it."""
        return self.layer if self.boundary == "after" else self.layer - 1


class WeightSchedule(Model):
    """How the weights of the early losses reach their targets: a factor from ``init`` to 1 (paper C.1)."""

    style: Literal["linear", "cosine"] = "linear"
    init: Fraction
    """Factor in the first iteration: below 1 warms up, above 1 cools down."""
    iters: PositiveInt
    """Iterations until the factor is 1, where it stays."""


class LossWeightSpec(Model):
    """Target weights of the early losses; the final loss has weight 1 (paper 3.3)."""

    policy: Literal["depth", "uniform", "normalized", "usage"] = "depth"
    """``depth``: scale x depth/num_layers (the paper's 0.25/0.5); ``uniform``: scale for each;
    ``normalized``: proportional to depth, summing to scale; ``usage``: proportional to the share of tokens
    that leave at the exit, summing to scale."""
    scale: PositiveFloat = 1.0
    warmup: WeightSchedule | None = None


class ExitsSpec(Model):
    """Which early exits are wanted: a number for the planner to place, or layers placed by hand."""

    count: Literal["auto"] | Annotated[int, Field(ge=0)] | None = None
    layers: tuple[ExitRequest, ...] = ()
    max_count: PositiveInt = 4
    """Most exits that ``count: auto`` may choose."""
    objective: Literal["iteration_time", "decode_speed_up"] = "iteration_time"
    """What placement and ``count: auto`` optimise. ``iteration_time``: the fastest training, with as many
    exits as the limits allow; ``decode_speed_up``: the fastest decoding within the limits, maybe no exit."""
    head: HeadKind = "norm"
    untie_exit_output_weights: bool = False
    exit_forward: Literal["auto", "deferred", "eager"] = "auto"
    loss_weights: LossWeightSpec = LossWeightSpec()

    @model_validator(mode="after")
    def _count_or_layers(self) -> Self:
        if self.count is not None and self.layers:
            raise ValueError("give either exits.count or exits.layers, not both")
        seen: dict[int, ExitRequest] = {}
        for request in self.layers:
            other = seen.setdefault(request.depth, request)
            if other is not request:
                raise ValueError(
                    f"exit {request.boundary} layer {request.layer} and exit {other.boundary} layer "
                    f"{other.layer} both read the hidden state after {request.depth} layers; remove one"
                )
        return self


class FillCounts(Model):
    """Partial microbatches per bubble region, chosen by hand."""

    warmup: Annotated[int, Field(ge=0)] = 0
    """Inserts between warm-up and steady state; insert k of K goes K+1-k stages deep."""
    cooldown: Annotated[int, Field(ge=0)] = 0
    """Microbatches in the cool-down whose backward passes the last stages only."""


def _known_policy(value: object) -> object:
    if value not in ("none", "auto"):
        raise ValueError(
            f"{value!r} is no fill; expected none, auto or counts as in {{warmup: 1, cooldown: 2}}"
        )
    return value


FillPolicy = Annotated[
    # Tags in brackets are not taken for keys in error messages.
    Annotated[Literal["none", "auto"], BeforeValidator(_known_policy), Tag("[word]")]
    | Annotated[FillCounts, Tag("[counts]")],
    Discriminator(lambda value: "[counts]" if isinstance(value, dict | FillCounts) else "[word]"),
]


class FillSpec(Model):
    """Partial microbatches in the bubbles of the pipeline (paper 3.3)."""

    policy: FillPolicy = "none"
    """``auto``: as many as the limits on time and memory allow."""
    mode: FillMode = "added"
    max_time_overhead: Fraction = 0.0
    """Largest accepted slow-down of an iteration by ``auto``, against its full microbatches alone (a
    fraction)."""


class DecodeSpec(Model):
    """How the trained model will be decoded, one sequence at a time; plans predict its latency."""

    mode: Literal["kv_recompute", "catch_up"] = "catch_up"
    """What ``exits.objective: decode_speed_up`` makes fast; plans predict every mode."""
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] = 0.8
    """Confidence at which a token leaves early; 1 never."""
    recompute_limit: Annotated[int, Field(ge=0)] = 8
    """Most tokens that may wait for their deep keys and values before a pass through all layers."""
    prior: UsagePrior = UsagePrior()
    """How many tokens leave early, supposed until a usage file says what was measured."""


class LimitsSpec(Model):
    """Limits that a plan must respect; None means no limit."""

    device_memory_bytes: PositiveInt | None = None
    max_time_overhead: Fraction = 0.05
    """Largest accepted slow-down against the same model without exits (a fraction); binds ``count: auto``."""


class RunSpec(Model):
    """The whole run file."""

    schema_version: Literal[1]
    name: str = "run"
    model: ModelSpec
    parallel: ParallelSpec = ParallelSpec()
    training: TrainingSpec
    data: DataSpec
    exits: ExitsSpec = ExitsSpec()
    decode: DecodeSpec = DecodeSpec()
    fill: FillSpec = FillSpec()
    limits: LimitsSpec = LimitsSpec()

    @property
    def num_microbatches(self) -> int:
        """Microbatches per iteration and data-parallel rank (M)."""
        per_step = self.training.micro_batch_size * self.parallel.data_parallel_size
        return self.training.global_batch_size // per_step

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rounded up so that every tensor-parallel rank gets an equal, aligned share."""
        unit = self.model.make_vocab_size_divisible_by * self.parallel.tensor_model_parallel_size
        return -(-self.model.vocab_size // unit) * unit

    @model_validator(mode="after")
    def _layout_is_possible(self) -> Self:
        model, parallel, training = self.model, self.parallel, self.training
        tp = parallel.tensor_model_parallel_size
        _require_divides(
            "model.num_attention_heads", model.num_attention_heads, "parallel.tensor_model_parallel_size", tp
        )
        _require_divides(
            "model.num_query_groups", model.query_groups, "parallel.tensor_model_parallel_size", tp
        )
        _require_divides("model.ffn_hidden_size", model.ffn_size, "parallel.tensor_model_parallel_size", tp)
        self._check_split()
        _require_divides(
            "training.global_batch_size",
            training.global_batch_size,
            "micro_batch_size x data_parallel_size",
            training.micro_batch_size * parallel.data_parallel_size,
        )
        if training.lr_warmup_iters > training.train_iters:
            raise ValueError(
                f"training.lr_warmup_iters is {training.lr_warmup_iters}, more than train_iters "
                f"{training.train_iters}; lower it"
            )
        if training.min_lr > training.lr:
            raise ValueError(f"training.min_lr {training.min_lr} exceeds training.lr {training.lr}; lower it")
        self._check_exits()
        self._check_fill()
        return self

    def _check_fill(self) -> None:
        if not isinstance(self.fill.policy, FillCounts):
            return
        stages = self.parallel.pipeline_model_parallel_size
        for name, count in (("warmup", self.fill.policy.warmup), ("cooldown", self.fill.policy.cooldown)):
            if count >= stages:
                raise ValueError(
                    f"fill.policy.{name} is {count}; {stages} pipeline stages take at most {stages - 1}"
                )
        together = self.fill.policy.warmup + self.fill.policy.cooldown
        if self.fill.mode == "same_count" and together >= self.num_microbatches:
            raise ValueError(
                f"fill.policy turns {together} of {self.num_microbatches} microbatches into partial ones; "
                "leave a full one, or take mode: added"
            )

    def _check_split(self) -> None:
        layers, stages = self.model.num_layers, self.parallel.pipeline_model_parallel_size
        split = self.parallel.layer_split
        if split == "uniform" and layers % stages:
            raise ValueError(
                f"model.num_layers {layers} is not divisible by parallel.pipeline_model_parallel_size "
                f"{stages}; change one of them, or set parallel.layer_split to auto or to layers per stage"
            )
        if layers < stages:
            raise ValueError(
                f"model.num_layers {layers} is less than parallel.pipeline_model_parallel_size {stages}; "
                "every stage needs a layer"
            )
        if isinstance(split, tuple) and (len(split) != stages or sum(split) != layers):
            raise ValueError(
                f"parallel.layer_split {list(split)} gives {len(split)} stages {sum(split)} layers together; "
                f"expected {stages} numbers that add up to num_layers {layers}"
            )

    def _check_exits(self) -> None:
        layers = self.model.num_layers
        for index, request in enumerate(self.exits.layers):
            where = f"exits.layers[{index}]: exit {request.boundary} layer {request.layer}"
            if request.layer > layers:
                raise ValueError(f"{where} is outside the model; layers are 1 to {layers}")
            if request.depth == layers:
                raise ValueError(f"{where} is the final exit itself; choose an earlier layer")
            if request.depth == 0:
                raise ValueError(f"{where} has no layer below it; choose a later one")
        if isinstance(self.exits.count, int) and self.exits.count > layers - 1:
            raise ValueError(
                f"exits.count is {self.exits.count}; a model of {layers} layers has room for "
                f"{layers - 1} early exits"
            )


def load_run(path: Path) -> tuple[RunSpec, str]:
    """Read a run file; paths inside become absolute, taken relative to the file's own folder.

    Returns:
        The run and the SHA-256 of the file.

    Raises:
        FileError, SchemaError.
    """
    run, digest = load_yaml(path, RunSpec, "run file")
    return with_data_paths(run, lambda p: str((path.parent / p).resolve())), digest


def with_data_paths(run: RunSpec, change: Any) -> RunSpec:
    """The same run with ``change`` applied to its data and tokenizer paths."""
    data = run.data.model_copy(
        update={"data_path": change(run.data.data_path), "tokenizer": change(run.data.tokenizer)}
    )
    return run.model_copy(update={"data": data})


def replace_keys(run: RunSpec, changes: dict[str, Any]) -> RunSpec:
    """A run with dotted keys replaced, e.g. ``{"training.train_iters": 5}``, validated again.

    Raises:
        SpecError: unknown key. SchemaError: the changed run is impossible.
    """
    document = run.model_dump(mode="json")
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        node: Any = document
        for parent in parents:
            node = node.get(parent)
            if not isinstance(node, dict):
                raise SpecError(f"no key '{dotted}' in a run file")
        if last not in node:
            raise SpecError(f"no key '{dotted}' in a run file")
        node[last] = value
    return validate(document, RunSpec, "run")


def _require_divides(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        raise ValueError(f"{name} {value} is not divisible by {by_name} {by}; change one of them")
