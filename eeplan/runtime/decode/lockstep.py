"""Forwards of several sequences side by side: whoever is at the same depth shares the products there.

All begin at the first layer, and nobody goes on to the next depth before all others there have said what they
want. Each decides for itself where it stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eeplan.runtime.decode.network import Transformer
from eeplan.runtime.decode.ops import Emitted, Logits, Op, Program, RunBlock, RunLayers
from eeplan.runtime.decode.products import SHORT


@torch.no_grad()
def advance(transformer: Transformer, programs: Sequence[Program]) -> list[Emitted]:
    """Run one forward of every program.

    Args:
        transformer: what all programs' networks run.
        programs: none at its end. Those of one sequence stand in the order of their positions.

    Returns:
        What each emitted.
    """
    return _Forward(transformer, programs).run()


class _Forward:
    def __init__(self, transformer: Transformer, programs: Sequence[Program]) -> None:
        self.transformer = transformer
        self.programs = programs
        self.asked: dict[int, Op] = {}
        """By program, in their order: what it waits for."""
        self.emitted: list[Emitted] = [()] * len(programs)

    def run(self) -> list[Emitted]:
        for index in range(len(self.programs)):
            self._resume(index, None)
        while self.asked:
            depth = min(op.depth for op in self.asked.values())
            here = {index: op for index, op in self.asked.items() if op.depth == depth}
            if logits := {i: op for i, op in here.items() if isinstance(op, Logits)}:
                self._serve_logits(logits)
            elif blocks := {i: op for i, op in here.items() if isinstance(op, RunBlock)}:
                self._serve_blocks(blocks)
            else:
                self._serve_layers({i: op for i, op in here.items() if isinstance(op, RunLayers)})
        return self.emitted

    def _resume(self, index: int, result: Tensor | None) -> None:
        asked = self.programs[index].send(result)
        if isinstance(asked, tuple):
            self.emitted[index] = asked
            self.asked.pop(index, None)
        else:
            self.asked[index] = asked

    def _serve_logits(self, ops: dict[int, Logits]) -> None:
        shared = {i: op for i, op in ops.items() if op.candidates_C is None and len(op.hidden_RH) <= SHORT}
        if len(shared) > 1:
            rows_RH = torch.cat([op.hidden_RH for op in shared.values()])
            depth = next(iter(shared.values())).depth
            self._hand_out(shared, self.transformer.logits(depth, rows_RH))
        for index, op in ops.items():
            if index not in shared or len(shared) == 1:
                self._resume(index, op.alone())

    def _serve_blocks(self, ops: dict[int, RunBlock]) -> None:
        shared = {i: op for i, op in ops.items() if len(op.hidden_RH) <= SHORT}
        # Prompts first: later rows of the same sequence may stand beside them.
        for index, op in ops.items():
            if index not in shared:
                self._resume(index, op.alone())
        if shared:
            rows_RH = torch.cat([op.hidden_RH for op in shared.values()])
            parts = [op.network.part(op.hidden_RH, op.position) for op in shared.values()]
            depth = next(iter(shared.values())).depth
            self._hand_out(shared, self.transformer.run_block(depth, rows_RH, parts))

    def _serve_layers(self, ops: dict[int, RunLayers]) -> None:
        """As far as the first of them goes, or to where somebody joins."""
        depth = next(iter(ops.values())).depth
        joins = [op.depth for op in self.asked.values() if op.depth > depth]
        stop = min([*joins, *(op.stop for op in ops.values())])
        shared = {i: op for i, op in ops.items() if len(op.hidden_RH) <= SHORT}
        # Prompts first: later rows of the same sequence may stand beside them.
        results = {
            index: op.network.run_layers(op.hidden_RH, op.position, depth, stop)
            for index, op in ops.items()
            if index not in shared
        }
        if shared:
            rows_RH = torch.cat([op.hidden_RH for op in shared.values()])
            parts = [op.network.part(op.hidden_RH, op.position) for op in shared.values()]
            hidden_RH = self.transformer.run_layers(rows_RH, parts, depth, stop)
            sizes = [part.rows for part in parts]
            results.update(zip(shared, hidden_RH.split(sizes), strict=True))
        for index, op in ops.items():
            if op.stop == stop:
                self._resume(index, results[index])
            else:
                self.asked[index] = replace(op, hidden_RH=results[index], depth=stop)

    def _hand_out(self, ops: dict[int, Logits] | dict[int, RunBlock], result_RX: Tensor) -> None:
        sizes = [len(op.hidden_RH) for op in ops.values()]
        for index, rows in zip(ops, result_RX.split(sizes), strict=True):
            self._resume(index, rows)
