"""Several datasets as one: which of them each sample of a run is drawn from.

The order is Megatron's: sample by sample the dataset that lags furthest behind its share, so that any number
of samples from the start holds the proportions as exactly as whole samples can, whatever the seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset

_SURPLUS = 0.005
"""Samples that a dataset is indexed for beyond its share, as megatron's builder does; the number of samples
that are asked for decides their order."""


class Blend:
    """Samples of several datasets under one numbering."""

    def __init__(
        self, datasets: Sequence[GPTDataset], dataset_N: NDArray[np.int16], sample_N: Sequence[int]
    ) -> None:
        self.datasets = tuple(datasets)
        self._dataset_N, self._sample_N = dataset_N, sample_N

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The sample's tensors, as ``GPTDataset`` gives them."""
        return self.datasets[self._dataset_N[index]][int(self._sample_N[index])]

    def prefix_of(self, index: int) -> str:
        """Path prefix of the dataset that the sample is drawn from."""
        return self.datasets[self._dataset_N[index]].dataset.path_prefix


def sizes(weights: Sequence[float], num_samples: int) -> list[int]:
    """Samples to index of each dataset; ``weights`` add up to 1."""
    if len(weights) == 1:
        return [num_samples]
    return [math.ceil(math.ceil(num_samples * weight) * (1 + _SURPLUS)) for weight in weights]


def indices(
    weights: Sequence[float], num_samples: int, cache: Path
) -> tuple[NDArray[np.int16], Sequence[int]]:
    """Which dataset each sample is drawn from, and which of its samples; kept in ``cache``.

    Raises:
        OSError, ValueError, EOFError: the cache cannot be written or read.
    """
    if len(weights) == 1:
        return np.broadcast_to(np.int16(0), num_samples), range(num_samples)
    files = [cache / f"blend_{name}.npy" for name in ("dataset", "sample")]
    if not all(file.is_file() for file in files):
        from megatron.core.datasets import helpers

        dataset_N = np.zeros(num_samples, dtype=np.int16)
        sample_N = np.zeros(num_samples, dtype=np.int64)
        helpers.build_blending_indices(dataset_N, sample_N, list(weights), len(weights), num_samples, False)
        np.save(files[0], dataset_N)
        np.save(files[1], sample_N)
    read_dataset_N, read_sample_N = (np.load(file, mmap_mode="r") for file in files)
    if len(read_dataset_N) != num_samples or len(read_sample_N) != num_samples:
        raise ValueError(f"{files[0].name} is not for {num_samples} samples")
    return read_dataset_N, cast(Sequence[int], read_sample_N)
