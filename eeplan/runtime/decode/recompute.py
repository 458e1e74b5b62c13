"""Decoding with early exits by KV recomputation (EE-LLM 4), one sequence.

A token that leaves at depth d has keys and values on the first d layers only. It joins a list of pending
tokens, and every later forward runs the pending tokens again, from the first layer on, as one batch of rows
with the current token: whichever layers the current token reaches, all tokens before it have keys and values
there. A forward that runs through to the last layer clears the list; when the list is as long as the user's
limit, the next forward has to.

The pending tokens are always the latest ones, so a forward covers consecutive positions and attends causally
to itself and to the store. Nothing is approximated: every token is the one that computing all layers at all
positions would give, up to the rounding of differently shaped matrix products. A forced full pass fills
the store but does not change the exit at which its token is emitted.

Starting again from the first layer repeats work: the hidden state at which a token left is not kept here.
Heads that hold a transformer layer attend to the sequence as well and run on all rows; other heads look at
the current token alone. With a threshold of 1 no head but the final one runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eeplan.errors import DecodeError
from eeplan.runtime.attention import SdpaCoreAttention
from eeplan.runtime.decode.kv import KeyValueStore, attached
from eeplan.runtime.decode.policy import ExitPolicy, confidence_of
from eeplan.runtime.decode.sampling import Sampling
from eeplan.runtime.model import EarlyExitGPT
from eeplan.runtime.stage import FINAL, exit_name


@dataclass(frozen=True, slots=True)
class Emission:
    """One generated token and where it came from."""

    token: int
    exit: str
    """``exit_<depth>``, or ``final``."""
    depth: int
    """Layers that the emitting exit reads; the number of layers for the final one."""
    confidence: float
    """Largest probability there, at temperature 1, over the vocabulary without padding."""


@dataclass(slots=True)
class Work:
    """What a generation has computed so far, prompt included."""

    forwards: int = 0
    full_passes: int = 0
    """Forwards through all layers, the prompt's included."""
    layer_rows: int = 0
    """Decoder layers run, each counted once per position it ran on; exit heads are not counted."""


@dataclass(slots=True)
class RecomputeDecoder:
    """Decoder state of one sequence. Feed the prompt to ``prefill``, then each token to ``step``."""

    model: EarlyExitGPT
    policy: ExitPolicy
    sampling: Sampling
    generator: torch.Generator
    recompute_limit: int
    """Longest list of pending tokens; 0 runs every token through all layers."""
    store: KeyValueStore
    attention: tuple[SdpaCoreAttention, ...]
    rotary: Tensor
    """Angles [capacity, 1, 1, D] of all positions."""
    vocab_size: int
    """Tokens that may be emitted; logits beyond are padding."""
    length: int = 0
    """Tokens fed so far."""
    pending: list[int] = field(default_factory=list)
    """The latest tokens, whose deep keys and values are missing."""
    work: Work = field(default_factory=Work)

    def prefill(self, prompt: Sequence[int]) -> Emission:
        """Run the prompt through all layers and emit the first token.

        Args:
            prompt: token ids, at least one, at most the store's capacity.
        """
        assert self.length == 0, "a decoder serves one prompt"
        return self._extend(list(prompt), full=True)

    def step(self, token: int) -> Emission:
        """Feed the token emitted last (or any other) and emit the next one."""
        return self._extend([token], full=len(self.pending) >= self.recompute_limit)

    @torch.no_grad()
    def _extend(self, new: list[int], full: bool) -> Emission:
        tokens = self.pending + new
        start, stop = self.length - len(self.pending), self.length + len(new)
        self.length, self.pending = stop, tokens
        with attached(self.attention, self.store.rows(start, stop)):
            emission, reached = self._forward(tokens, start, full)
        if reached == self.model.stage_spec.last_layer:
            self.pending = []
            self.work.full_passes += 1
        self.work.forwards += 1
        self.work.layer_rows += reached * len(tokens)
        return emission

    def _forward(self, tokens: list[int], start: int, full: bool) -> tuple[Emission, int]:
        """Run rows upwards until the last one leaves; returns what it emits and the depth reached."""
        model, rotary = self.model, self.rotary[start : start + len(tokens)]
        tokens_1S = torch.tensor([tokens], device=rotary.device)
        positions_1S = torch.arange(start, start + len(tokens), device=rotary.device)[None]
        hidden_S1H = model.embed(tokens_1S, positions_1S)
        emission, depth = None, 0
        early = () if self.policy.never_leaves else sorted(model.stage_spec.exits, key=lambda e: e.depth)
        for exit_ in early:
            hidden_S1H = model.run_layers(hidden_S1H, rotary, depth, exit_.depth)
            depth = exit_.depth
            # A block's keys and values are wanted at every position, also when the token is emitted already.
            if exit_.head == "block":
                logits_V = model.exit_logits(depth, hidden_S1H, rotary)[-1, 0]
            elif emission is None:
                logits_V = model.exit_logits(depth, hidden_S1H[-1:], rotary[-1:])[-1, 0]
            if emission is None:
                emission = self._emit_if_confident(logits_V, depth)
            if emission is not None and not full:
                return emission, depth
        last = model.stage_spec.last_layer
        hidden_S1H = model.run_layers(hidden_S1H, rotary, depth, last)
        if emission is None:
            logits_V = self._real(model.final_logits(hidden_S1H[-1:])[-1, 0])
            emission = self._emit(logits_V, FINAL, last, _checked(confidence_of(logits_V), FINAL))
        return emission, last

    def _emit_if_confident(self, logits_V: Tensor, depth: int) -> Emission | None:
        logits_V, name = self._real(logits_V), exit_name(depth)
        confidence = _checked(confidence_of(logits_V), name)
        return self._emit(logits_V, name, depth, confidence) if self.policy.leaves(confidence) else None

    def _emit(self, logits_V: Tensor, name: str, depth: int, confidence: float) -> Emission:
        return Emission(self.sampling.pick(logits_V, self.generator), name, depth, confidence)

    def _real(self, logits_V: Tensor) -> Tensor:
        """Logits without the vocabulary's padding, which no tokenizer can decode."""
        return logits_V[: self.vocab_size]


def make_decoder(
    model: EarlyExitGPT,
    policy: ExitPolicy,
    sampling: Sampling,
    *,
    seed: int,
    recompute_limit: int,
    capacity: int,
    vocab_size: int | None = None,
) -> RecomputeDecoder:
    """Decoder of one sequence of at most ``capacity`` tokens, with an empty store.

    Args:
        model: the whole model on one process, without tensor parallelism.
        vocab_size: tokens that the tokenizer knows; default, the model's vocabulary without padding.

    Raises:
        DecodeError: ``recompute_limit`` is negative.
    """
    check_recompute_limit(recompute_limit)
    attention = attention_modules(model)
    weight = next(model.parameters())
    store = KeyValueStore(
        num_layers=len(attention),
        capacity=capacity,
        num_query_groups=model.run.model.query_groups,
        head_dim=model.run.model.head_dim,
        dtype=weight.dtype,
        device=weight.device,
    )
    with torch.no_grad():
        rotary = model.rotary(capacity)
    return RecomputeDecoder(
        model=model,
        policy=policy,
        sampling=sampling,
        generator=torch.Generator().manual_seed(seed),
        recompute_limit=recompute_limit,
        store=store,
        attention=attention,
        rotary=rotary,
        vocab_size=model.run.model.vocab_size if vocab_size is None else vocab_size,
    )


def check_recompute_limit(recompute_limit: int) -> None:
    """Refuse a limit that no list of pending tokens can have.

    Raises:
        DecodeError: it is negative.
    """
    if recompute_limit < 0:
        raise DecodeError(
            f"recompute limit is {recompute_limit}; expected the most tokens that may wait for their deep "
            "keys and values, or 0 to run every token through all layers"
        )


def emissions(decoder: RecomputeDecoder, prompt: Sequence[int]) -> Iterator[Emission]:
    """Tokens after a prompt, one by one, until the store is full."""
    emission = decoder.prefill(prompt)
    yield emission
    while decoder.length < decoder.store.capacity:
        emission = decoder.step(emission.token)
        yield emission


def attention_modules(model: EarlyExitGPT) -> tuple[SdpaCoreAttention, ...]:
    """Every module that needs a layer of the store: decoder layers, then block heads by depth."""
    blocks = [e.depth for e in sorted(model.stage_spec.exits, key=lambda e: e.depth) if e.head == "block"]
    layers = [*model.decoder.layers, *(model.exits[str(depth)].block for depth in blocks)]
    return tuple(layer.self_attention.core_attention for layer in layers)


def _checked(confidence: float, name: str) -> float:
    if not math.isfinite(confidence):
        raise DecodeError(
            f"the logits of {name} are not finite numbers; the checkpoint is damaged or diverged"
        )
    return confidence
