"""Keys and values of one sequence, by (layer, position), and which of them exist.

A token that left early has entries up to its exit only. Which decoding mode fills the others, and when, is
not decided here; the store only refuses to let a query look at an entry that nobody has filled. Whatever the
mode, rows are filled in the order of their positions, so what exists on a layer is always a beginning of the
sequence, and one number a layer says which entries are valid.

Layers are numbered from 0. Transformer layers inside exit heads (``block`` heads) attend as well and follow
the decoder's layers, in order of depth.

Shape suffixes: L layers, P positions, R rows (positions of one forward), K keys, G key/value heads, D head
channels.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
        shape = (num_layers, 2, num_query_groups, capacity, head_dim)
        self.entries_L2GPD = torch.zeros(shape, dtype=dtype, device=device)
        """Keys, then values."""
        self.valid_L = [0] * num_layers
        """On layer l the entries of positions 0 to valid_L[l] - 1 exist."""
        self.capacity = capacity
        """Positions that fit."""

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.entries_L2GPD.nbytes

    def extend(self, layer: int, start: int, entries_RG2D: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of consecutive positions from ``start``; return all up to the last one's.

        Entries that exist already are written again: the same numbers up to rounding.

        Returns:
            Keys and values [G, K, D].
        """
        stop = start + len(entries_RG2D)
        if stop > self.capacity:
            raise IndexError(f"positions {start} to {stop - 1} do not fit a store of {self.capacity}")
        missing = start - self.valid_L[layer]
        assert missing <= 0, f"layer {layer}: {missing} positions before {start} have no keys yet"
        entries_2GPD = self.entries_L2GPD[layer]
        entries_2GPD[:, :, start:stop] = entries_RG2D.permute(2, 1, 0, 3)
        self.valid_L[layer] = max(stop, self.valid_L[layer])
        keys_GKD, values_GKD = entries_2GPD[:, :, :stop].unbind()
        return keys_GKD, values_GKD

    def truncate(self, length: int) -> None:
        """Forget every entry from position ``length`` on: those tokens were drafts, and are refused."""
        self.valid_L = [min(length, valid) for valid in self.valid_L]

    def suppose_filled(self, length: int) -> None:
        """Let the entries of the first ``length`` positions count as existing, to time what reads them."""
        self.valid_L = [length] * len(self.valid_L)
