"""The decoding modes by name, and the decoder of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, get_args

import torch

from eeplan.errors import DecodeError
from eeplan.runtime.decode.decoder import ExitDecoder
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.exit_check import ExitCheck
from eeplan.runtime.decode.network import DecodeNetwork
from eeplan.runtime.decode.ops import Program
from eeplan.runtime.decode.policy import ExitPolicy
from eeplan.runtime.decode.rows import RowRunner
from eeplan.runtime.decode.sampling import Sampling
from eeplan.runtime.decode.speculative import SpeculativeDecoder
from eeplan.runtime.model import EarlyExitGPT, ExitSpec

LocalMode = Literal["full", "kv_recompute", "catch_up", "self_speculative"]
"""How one process decodes: without early exits; with exits, where a later forward completes the tokens that
left, from the first layer on or from where they left; with an early exit that drafts for the full model."""
Mode = LocalMode | Literal["pipeline"]
"""``pipeline`` takes several processes: later stages complete the tokens that left (see ``pipeline``)."""
MODES: tuple[LocalMode, ...] = get_args(LocalMode)
ALL_MODES: tuple[Mode, ...] = (*MODES, "pipeline")
DEFAULT_MODE: Mode = "catch_up"
DEFAULT_LIMIT = 8


class Decoder(Protocol):
    """A decoder of one sequence."""

    @property
    def rows(self) -> RowRunner:
        """What it runs tokens with."""
        ...

    def program(self, prompt: Sequence[int]) -> Program:
        """Tokens after a prompt, until the store is full."""
        ...

    def emissions(self, prompt: Sequence[int]) -> Iterator[Emission]:
        """The same on its own, token by token."""
        ...


def make_decoder(
    model: EarlyExitGPT,
    mode: Mode,
    policy: ExitPolicy,
    sampling: Sampling,
    *,
    seed: int,
    recompute_limit: int,
    capacity: int,
    vocab_size: int | None = None,
) -> ExitDecoder | SpeculativeDecoder:
    """Decoder of one sequence of at most ``capacity`` tokens, with an empty store.

    Args:
        model: the whole model on one process, without tensor parallelism.
        policy: ``full`` has no use for it; ``self_speculative`` drafts from its exit, the shallowest if there
            are several, while that is as confident as its threshold.
        recompute_limit: most tokens that may wait for their deep keys and values, drafts included.
        vocab_size: tokens that the tokenizer knows; default, the model's vocabulary without padding.

    Raises:
        DecodeError: ``recompute_limit`` is negative; the policy names exits that the model does not have, or
            ``self_speculative`` has none.
    """
    vocab_size = model.run.model.vocab_size if vocab_size is None else vocab_size
    return decoder_on(
        DecodeNetwork(model, capacity, vocab_size),
        mode,
        policy,
        sampling,
        seed=seed,
        recompute_limit=recompute_limit,
    )


def decoder_on(
    network: DecodeNetwork,
    mode: Mode,
    policy: ExitPolicy,
    sampling: Sampling,
    *,
    seed: int,
    recompute_limit: int,
    top_logprobs: int = 0,
) -> ExitDecoder | SpeculativeDecoder:
    """As :func:`make_decoder`, of a network whose store is empty.

    Args:
        top_logprobs: how many likeliest tokens an emission lists.
    """
    check_recompute_limit(recompute_limit)
    if mode == "pipeline":
        raise DecodeError("mode pipeline takes an engine of pipeline stages; here use one of the other modes")
    in_use = policy.for_exits(network.exits)
    generator = torch.Generator().manual_seed(seed)
    if mode == "self_speculative":
        exit_, threshold = drafting_exit(policy, network.exits)
        return SpeculativeDecoder(
            rows=RowRunner(network, (exit_,), keeps_hidden=True),
            threshold=threshold,
            confidence=policy.confidence,
            sampling=sampling,
            generator=generator,
            limit=recompute_limit,
            top_logprobs=top_logprobs,
        )
    if mode == "full":
        in_use = ()
    return ExitDecoder(
        rows=RowRunner(network, tuple(exit_ for exit_, _ in in_use), keeps_hidden=mode == "catch_up"),
        check=exit_check(policy, in_use),
        first_early_token=policy.first_early_token,
        sampling=sampling,
        generator=generator,
        limit=recompute_limit,
        top_logprobs=top_logprobs,
    )


def exit_check(policy: ExitPolicy, in_use: Sequence[tuple[ExitSpec, float]]) -> ExitCheck:
    """The checks of a sequence at the exits in use."""
    thresholds = {exit_.depth: threshold for exit_, threshold in in_use}
    return ExitCheck(thresholds, policy.confidence, policy.candidates)


def drafting_exit(policy: ExitPolicy, exits: Sequence[ExitSpec]) -> tuple[ExitSpec, float]:
    """The exit that drafts: the shallowest one in use; and its threshold, which above 1 never drafts.

    Raises:
        DecodeError: there is none.
    """
    if not exits:
        raise DecodeError("mode self_speculative drafts from an early exit, and the model has none; use full")
    depth = min(policy.exits or [exit_.depth for exit_ in exits])
    in_use = {exit_.depth: (exit_, threshold) for exit_, threshold in policy.for_exits(exits)}
    exit_ = next(one for one in exits if one.depth == depth)
    return in_use.get(depth, (exit_, float("inf")))


def decode_mode(name: str) -> Mode:
    """The mode of this name.

    Raises:
        DecodeError: there is none.
    """
    for mode in ALL_MODES:
        if mode == name:
            return mode
    raise DecodeError(f"mode is '{name}'; expected one of {', '.join(ALL_MODES)}")


def check_recompute_limit(recompute_limit: int) -> None:
    """Refuse a limit that no list of waiting tokens can have.

    Raises:
        DecodeError: it is negative.
    """
    if recompute_limit < 0:
        raise DecodeError(
            f"recompute limit is {recompute_limit}; expected the most tokens that may wait for their deep "
            "keys and values, or 0 to run every token through all layers"
        )
