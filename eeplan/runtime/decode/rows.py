"""Which rows a forward takes along: the one structure under all decoding modes.

A token that leaves before the last layer waits: its keys and values on the deeper layers are missing, and no
later token can be computed there before they exist. A forward starts with the current token and, at every
depth, is joined by the tokens that wait there; where the current token stops, they all stop, and wait. The
modes differ only in where a token that left waits:

- ``catch_up``: where it left, with its hidden state. Every layer runs exactly once on every token.
- ``kv_recompute`` (EE-LLM 4): at the first layer, with its id. Layers below its exit run again.
- ``full``: nobody leaves, so nobody waits.
- ``self_speculative``: as ``catch_up``; those who wait are drafts (see ``speculative``).

Those who wait are the latest tokens: one that goes further takes all others along. So a forward covers
consecutive positions, and attends causally to itself and to the store. Nothing is approximated: keys and
values are those of computing all layers at all positions, up to the rounding of differently shaped products.

Heads that hold a transformer layer attend to the sequence as well, and run on all rows that pass; other heads
look at the current token alone.

Shape suffixes: R rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eeplan.runtime.decode.emission import CheckCounts
from eeplan.runtime.decode.network import DecodeNetwork
from eeplan.runtime.decode.ops import RunBlock, RunLayers, Steps, alone
from eeplan.runtime.model import ExitSpec

Check = Callable[[ExitSpec, Tensor], Steps[bool]]
"""Given an exit and what its head reads of the current token [1, H]: whether it leaves. Not asked again if it
does."""


@dataclass(slots=True)
class Work:
    """What a generation has computed so far, prompt included."""

    forwards: int = 0
    full_passes: int = 0
    """Forwards through all layers, the prompt's included."""
    layer_rows: int = 0
    """Decoder layers run, each counted once per position it ran on; exit heads are not counted."""
    exits: CheckCounts = field(default_factory=CheckCounts)
    """What the checks of early exits came to."""

    @property
    def checks(self) -> int:
        """Early heads whose logits were computed for all tokens."""
        return self.exits.full


@dataclass(frozen=True, slots=True)
class Waiting:
    """A token whose deep keys and values are missing."""

    token: int
    depth: int
    """Layers done, as far as this mode kept them."""
    hidden_1H: Tensor | None
    """Its hidden state there; None at depth 0."""


@dataclass(slots=True)
class RowRunner:
    """Runs tokens of one sequence through the network, and keeps those that wait."""

    network: DecodeNetwork
    exits: tuple[ExitSpec, ...]
    """Where tokens may leave, by depth."""
    keeps_hidden: bool
    """Whether a token waits where it left, or at the first layer."""
    length: int = 0
    """Tokens fed so far."""
    waiting: list[Waiting] = field(default_factory=list)
    """By position, the latest ones; deeper ones come first."""
    work: Work = field(default_factory=Work)

    def forward(self, tokens: Sequence[int], check: Check | None, forced: bool) -> Steps[tuple[int, Tensor]]:
        """Feed tokens, or with none complete those who wait.

        Args:
            check: asked at every exit about the last token; None if it may not leave.
            forced: go through all layers also when the token has left.

        Returns:
            The depth reached, and the hidden states [R, H] there of every row that got so far: tokens that
            waited, then the new ones.
        """
        network, first = self.network, self.length
        self.length += len(tokens)
        waiting, self.waiting = self.waiting, []
        along: list[int] = list(tokens)
        hidden_RH: Tensor | None = None
        depth, has_left = 0, False
        for exit_ in (*self.exits, None):
            hidden_RH = self._join(hidden_RH, waiting, along, depth)
            stop = network.num_layers if exit_ is None else exit_.depth
            if hidden_RH is not None:
                position = self.length - len(along)
                hidden_RH = yield RunLayers(network, hidden_RH, position, depth, stop)
                self.work.layer_rows += (stop - depth) * len(along)
            depth = stop
            if exit_ is None or hidden_RH is None:
                continue
            read_RH = hidden_RH
            if exit_.head == "block":
                # Its keys and values are wanted at every position, also when the token has left already.
                read_RH = yield RunBlock(network, hidden_RH, self.length - len(along), depth)
            if check is not None and not has_left:
                has_left = yield from check(exit_, read_RH[-1:])
            if has_left and not forced:
                self._wait(waiting, along, hidden_RH, depth)
                break
        assert hidden_RH is not None, f"nothing to run at position {first}"
        self.work.forwards += 1
        self.work.full_passes += depth == network.num_layers
        return depth, hidden_RH

    def complete(self) -> None:
        """Fill what is missing, so that the store holds every entry of the tokens fed so far."""
        if self.waiting:
            alone(self.forward((), None, forced=True))

    def forget(self, length: int) -> None:
        """Take back the tokens from position ``length`` on."""
        assert not self.waiting, "a token that waits has no entries to take back"
        self.length = length
        self.network.store.truncate(length)

    def _join(
        self, hidden_RH: Tensor | None, waiting: list[Waiting], along: list[int], depth: int
    ) -> Tensor | None:
        """Take those along who wait at ``depth``; ``along`` gets their ids."""
        joining: list[Waiting] = []
        while waiting and waiting[-1].depth == depth:
            joining.append(waiting.pop())
        joining.reverse()
        along[:0] = [one.token for one in joining]
        if depth == 0:
            return self.network.embed(along) if along else None
        kept = [one.hidden_1H for one in joining if one.hidden_1H is not None]
        parts = kept if hidden_RH is None else [*kept, hidden_RH]
        if len(parts) > 1:
            return torch.cat(parts)
        return parts[0] if parts else None

    def _wait(self, waiting: list[Waiting], along: list[int], hidden_RH: Tensor, depth: int) -> None:
        if not self.keeps_hidden:
            self.waiting = [Waiting(token, 0, None) for token in along]
            return
        rows = hidden_RH.split(1)
        self.waiting = [*waiting, *(Waiting(t, depth, row) for t, row in zip(along, rows, strict=True))]
