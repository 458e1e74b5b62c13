"""Products of a few rows with a weight matrix, whose rows do not depend on one another.

A matrix library chooses how to sum by the number of rows, so the same row can differ in its last bits when
others stand beside it; a threshold or a near tie may then fall the other way. Here every product of few rows
is cut into tiles of a fixed number of rows, filled up with zeros: the same operation for one row as for many.
So a sequence gets bit by bit the same numbers alone and in a batch, however others come and go.

On a CPU four rows are also what the library does best: they are held up by reading the weights alone, and
with the weights as the left-hand factor that goes faster than its product of a single row. Half-precision
products on a CPU (oneDNN) sum in one order for any number of rows, so they need no tiles.

Shape suffixes: R rows, I input channels, O output channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

Product = Callable[[Tensor, Tensor], Tensor]
"""Rows [R, I] and weights [O, I] to [R, O]."""

SHORT = 16
"""Most rows of one sequence that go in tiles. More, as in a long prompt, are a product of their own."""
CPU_TILE = 4
GPU_TILE = 16


def short_product(device: torch.device, dtype: torch.dtype) -> Product:
    """The product for few rows, of one sequence or of several."""
    if device.type == "cuda":
        return _tiled_on_gpu
    return _tiled if dtype in (torch.float32, torch.float64) else linear


def _tiled(rows_RI: Tensor, weight_OI: Tensor) -> Tensor:
    num_rows = len(rows_RI)
    missing = -num_rows % CPU_TILE
    if missing:
        rows_RI = pad(rows_RI, (0, 0, 0, missing))
    if num_rows <= CPU_TILE:
        return torch.mm(weight_OI, rows_RI.t()).t()[:num_rows].contiguous()
    tiles = [torch.mm(weight_OI, tile.t()).t() for tile in rows_RI.split(CPU_TILE)]
    return torch.cat(tiles)[:num_rows]


def _tiled_on_gpu(rows_RI: Tensor, weight_OI: Tensor) -> Tensor:
    num_rows = len(rows_RI)
    missing = -num_rows % GPU_TILE
    if missing:
        rows_RI = pad(rows_RI, (0, 0, 0, missing))
    if num_rows <= GPU_TILE:
        return linear(rows_RI, weight_OI)[:num_rows]
    return torch.cat([linear(tile, weight_OI) for tile in rows_RI.split(GPU_TILE)])[:num_rows]
