"""Keys and values of one sequence, by (layer, position), with a mask of the entries that exist.

A token that left early has entries up to its exit only. Which decoding mode fills the others, and when, is
not decided here; the store only refuses to let a query look at an entry that nobody has filled.

Layers are numbered from 0. Transformer layers inside exit heads (``block`` heads) attend as well and follow
the decoder's layers, in order of depth.

Shape suffixes: L layers, P positions, R rows (positions of one forward), K keys, G key/value heads, D head
channels; the batch axis is 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eeplan.runtime.attention import SdpaCoreAttention


class KeyValueStore:
    """Room for ``capacity`` positions on every layer. Allocated at once; nothing grows while decoding."""

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        num_query_groups: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, capacity, 1, num_query_groups, head_dim)
        self.keys_LP1GD = torch.zeros(shape, dtype=dtype, device=device)
        self.values_LP1GD = torch.zeros(shape, dtype=dtype, device=device)
        self.valid_LP = torch.zeros(num_layers, capacity, dtype=torch.bool)

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.valid_LP.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys_LP1GD.nbytes + self.values_LP1GD.nbytes

    def rows(self, start: int, stop: int) -> tuple[Rows, ...]:
        """A window per layer through which one forward reads and writes, for positions start to stop - 1."""
        if not 0 <= start < stop <= self.capacity:
            raise IndexError(f"positions {start} to {stop - 1} do not fit a store of {self.capacity}")
        mask = None if stop - start == 1 else _causal_mask(start, stop, self.keys_LP1GD.device)
        return tuple(Rows(self, layer, start, stop, mask) for layer in range(len(self.valid_LP)))


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive positions of one layer, as the attention module sees them (``KeyValueView``)."""

    store: KeyValueStore
    layer: int
    start: int
    stop: int
    mask_11RK: Tensor | None

    def extend(self, key_R1GD: Tensor, value_R1GD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Write these rows' keys and values; return all up to the last row, and the causal mask.

        Entries that exist already are written again: the same numbers up to rounding.
        """
        store, here, rows = self.store, slice(self.start, self.stop), self.stop - self.start
        assert len(key_R1GD) == rows, f"layer {self.layer}: {len(key_R1GD)} rows where {rows} are due"
        valid_K = store.valid_LP[self.layer, : self.stop]
        store.keys_LP1GD[self.layer, here] = key_R1GD
        store.values_LP1GD[self.layer, here] = value_R1GD
        valid_K[here] = True
        missing = self.stop - int(valid_K.sum())
        assert missing == 0, f"layer {self.layer}: {missing} positions before {self.start} have no keys yet"
        return (
            store.keys_LP1GD[self.layer, : self.stop],
            store.values_LP1GD[self.layer, : self.stop],
            self.mask_11RK,
        )


@contextlib.contextmanager
def attached(modules: Sequence[SdpaCoreAttention], rows: Sequence[Rows]) -> Iterator[None]:
    """Let attention modules read and write these rows meanwhile; they train as before afterwards."""
    for module, window in zip(modules, rows, strict=True):
        module.store = window
    try:
        yield
    finally:
        for module in modules:
            module.store = None


def _causal_mask(start: int, stop: int, device: torch.device) -> Tensor:
    """True where the query at position start + r may look at key k: k <= start + r."""
    queries_R = torch.arange(start, stop, device=device)
    keys_K = torch.arange(stop, device=device)
    return (keys_K[None, :] <= queries_R[:, None])[None, None]
