"""Training data to microbatches: megatron-core's ``GPTDataset``, sharded and resumable by sample number.

The order of samples is a function of the data, their weights, the seed, the sequence length, the split and
the number of samples the run asks for; nothing else. Index files are kept in ``cache/`` beside the (first)
data. They appear there complete or not at all (built aside, renamed as a folder), so processes and runs may
build at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import numpy as np

from eeplan.errors import DataError
from eeplan.runtime.dataset_files import (
    DataFiles,
    DataSummary,
    Part,
    check_data,
    part_documents,
    read_summary,
)
from eeplan.spec import RunSpec

if TYPE_CHECKING:
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset

    from eeplan.runtime.blend import Blend

__all__ = ["BatchStream", "DataRank", "Microbatch", "RankInfo", "build_batches"]


class Microbatch(TypedDict):
    """CPU tensors of shape [micro_batch_size, seq_length]."""

    tokens: torch.Tensor
    """int64."""
    labels: torch.Tensor
    """int64; the token that follows each of ``tokens``."""
    loss_mask: torch.Tensor
    """float32; 1 where the label counts."""
    position_ids: torch.Tensor
    """int64."""


class DataRank(Protocol):
    """A process's place among the data-parallel ranks (``backend.Backend`` has it)."""

    @property
    def data_rank(self) -> int: ...

    @property
    def data_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A :class:`DataRank` for callers without a backend."""

    data_rank: int = 0
    data_size: int = 1


class BatchStream(Iterator[Microbatch]):
    """Microbatches of one data-parallel rank, in order, until the run's samples are used up.

    Samples are dealt as Megatron does: of every ``micro_batch_size x data_size`` consecutive samples, rank r
    takes the r-th ``micro_batch_size``.
    """

    def __init__(
        self, blend: Blend, run: RunSpec, rank_info: DataRank, num_samples: int, start_sample: int
    ) -> None:
        self._blend = blend
        self._rank = rank_info.data_rank
        self._micro_batch_size = run.training.micro_batch_size
        self._stride = run.training.micro_batch_size * rank_info.data_size
        self._vocab_size = run.model.vocab_size
        self.num_samples = num_samples
        self.consumed_samples = 0
        self.seek(start_sample)

    def seek(self, sample: int) -> None:
        """Continue from ``sample``, counted over all data-parallel ranks from the start of the run.

        Raises:
            ValueError: beyond the run's samples, or in the middle of a microbatch.
        """
        if not 0 <= sample <= self.num_samples or sample % self._stride:
            raise ValueError(
                f"sample {sample} is no position of this stream: expected a multiple of {self._stride} "
                f"(micro_batch_size x data_parallel_size) up to {self.num_samples}"
            )
        self.consumed_samples = sample

    def __len__(self) -> int:
        """Microbatches left."""
        return (self.num_samples - self.consumed_samples) // self._stride

    def __next__(self) -> Microbatch:
        """The next microbatch of this rank; ``consumed_samples`` moves on by those of all ranks.

        Raises:
            StopIteration: the run's samples are used up. DataError: a token id outside the vocabulary.
        """
        if self.consumed_samples >= self.num_samples:
            raise StopIteration
        batch = self.read(0)
        self.advance(1)
        return batch

    def advance(self, microbatches: int) -> None:
        """Move on by so many microbatches of each rank.

        Raises:
            ValueError: beyond the run's samples.
        """
        self.seek(self.consumed_samples + microbatches * self._stride)

    def read(self, ahead: int) -> Microbatch:
        """The microbatch ``ahead`` of the next one; the position stays.

        Stages of one pipeline take the microbatches of a filled schedule in different orders, and each leaves
        some out; by number they agree.

        Raises:
            IndexError: beyond the run's samples. DataError: a token id outside the vocabulary.
        """
        import torch

        start = self.consumed_samples + ahead * self._stride
        if not 0 <= start < self.num_samples:
            raise IndexError(f"sample {start} is none of the run's {self.num_samples}")
        first = start + self._rank * self._micro_batch_size
        samples = [self._blend[index] for index in range(first, first + self._micro_batch_size)]
        batch = Microbatch(
            tokens=torch.stack([sample["tokens"] for sample in samples]),
            labels=torch.stack([sample["labels"] for sample in samples]),
            loss_mask=torch.stack([sample["loss_mask"] for sample in samples]),
            position_ids=torch.stack([sample["position_ids"] for sample in samples]),
        )
        largest = max(int(batch["tokens"].max()), int(batch["labels"].max()))
        if largest >= self._vocab_size:
            at = next(
                i for i, one in enumerate(samples) if largest in (one["tokens"].max(), one["labels"].max())
            )
            raise DataError(
                f"token id {largest} in sample {first + at} of {self._blend.prefix_of(first + at)}.bin is "
                f"outside model.vocab_size {self._vocab_size}; the file is damaged; build it again with "
                "'eeplan data build'"
            )
        return batch


def build_batches(
    run: RunSpec,
    *,
    rank_info: DataRank | None = None,
    start_sample: int = 0,
    split: Part = "train",
    extra_microbatches: int = 0,
) -> BatchStream:
    """Microbatches of one part of the run's data.

    With torch.distributed initialised this is a collective: every rank calls it, rank 0 writes the index
    cache, and an error on rank 0 is raised on all. Stages of one pipeline get equal streams.

    Args:
        run: with absolute data paths.
        rank_info: this process's data-parallel place; None is the only rank.
        start_sample: samples of the part consumed so far by all ranks together.
        split: ``train`` yields train_iters x global_batch_size samples in all, ``valid`` and ``test``
            eval_iters x global_batch_size; a small part is repeated in a new order.
        extra_microbatches: that each rank reads per training iteration beyond global_batch_size.

    Raises:
        DataError: as ``check_data``; the part is empty; the cache cannot be written or read.
        ValueError: ``rank_info`` does not fit the run; ``start_sample`` is not a microbatch boundary.
    """
    place = rank_info or RankInfo()
    if place.data_size != run.parallel.data_parallel_size or not 0 <= place.data_rank < place.data_size:
        raise ValueError(
            f"data rank {place.data_rank} of {place.data_size} does not fit data_parallel_size "
            f"{run.parallel.data_parallel_size}"
        )
    groups = run.training.train_iters if split == "train" else run.training.eval_iters
    num_samples = groups * run.training.global_batch_size
    if split == "train":
        stride = run.training.micro_batch_size * run.parallel.data_parallel_size
        num_samples += groups * extra_microbatches * stride
    folder = _agree_on_cache(run, split, num_samples)
    summaries = [read_summary(DataFiles(Path(one.path))) for one in run.data.datasets]
    try:
        blend = _blend(run, summaries, split, num_samples, folder)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"index cache {folder} cannot be read ({error}); delete the folder, and keep the data where "
            "every node sees it"
        ) from None
    return BatchStream(blend, run, place, num_samples, start_sample)


def _agree_on_cache(run: RunSpec, split: Part, num_samples: int) -> Path:
    """Folder with the index of this part, built by rank 0 if it is not there; same outcome on every rank."""
    import torch.distributed as dist

    together = dist.is_available() and dist.is_initialized()
    outcome: list[Any] = [None, None]
    if not together or dist.get_rank() == 0:
        try:
            outcome[0] = _build_cache(run, split, num_samples)
        except DataError as error:
            outcome[1] = str(error)
    if together:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise DataError(outcome[1])
    folder: Path = outcome[0]
    return folder


def _build_cache(run: RunSpec, split: Part, num_samples: int) -> Path:
    summaries = check_data(run)
    documents = [part_documents(run.data, summary.documents)[split] for summary in summaries]
    for dataset, summary, part in zip(run.data.datasets, summaries, documents, strict=True):
        if not part:
            raise DataError(
                f"the {split} part of data.split {run.data.split!r} is empty ({summary.documents} documents "
                f"in all in {dataset.path}); give it a larger share or more documents"
            )
    prefix = Path(run.data.datasets[0].path)
    root = prefix.parent / "cache"
    folder = root / f"{prefix.name}-{split}-{_cache_key(run, summaries, documents, num_samples)}"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=root, prefix=f".{folder.name}."))
        try:
            os.chmod(temporary, 0o755)
            _blend(run, summaries, split, num_samples, temporary)
            os.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        # Another process may have put the same index there meanwhile; it is as good as ours.
        if not folder.is_dir():
            raise DataError(
                f"cannot write the index cache into {root} ({error.strerror}); make its folder writable"
            ) from None
    return folder


def _cache_key(
    run: RunSpec, summaries: Sequence[DataSummary], documents: Sequence[range], num_samples: int
) -> str:
    """Names everything that the index depends on, the data's content included."""
    import megatron.core

    parts = [
        [[summary.idx_sha256, summary.bin_sha256] for summary in summaries],
        [[part.start, part.stop] for part in documents],
        [dataset.weight for dataset in run.data.datasets],
        num_samples,
        run.training.seed,
        run.training.seq_length,
        megatron.core.__version__,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _blend(
    run: RunSpec, summaries: Sequence[DataSummary], split: Part, num_samples: int, cache: Path
) -> Blend:
    from eeplan.runtime import blend

    weights = [dataset.weight for dataset in run.data.datasets]
    datasets = []
    for number, size in enumerate(blend.sizes(weights, num_samples)):
        # A folder for each: two datasets may have the same name and number of documents.
        folder = cache / str(number)
        folder.mkdir(exist_ok=True)
        prefix = Path(run.data.datasets[number].path)
        datasets.append(_gpt_dataset(run, prefix, summaries[number], split, size, folder))
    return blend.Blend(datasets, *blend.indices(weights, num_samples, cache))


def _gpt_dataset(
    run: RunSpec, prefix: Path, summary: DataSummary, split: Part, num_samples: int, cache: Path
) -> GPTDataset:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=run.training.seed,
        sequence_length=run.training.seq_length,
        blend=([str(prefix)], None),
        split=_plain_split(run.data.split),
        path_to_cache=str(cache),
        tokenizer=_MegatronTokenizer(summary),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    low_level = GPTDataset.build_low_level_dataset(str(prefix), config)
    documents = part_documents(run.data, summary.documents)[split]
    indices = np.arange(documents.start, documents.stop, dtype=np.int32)
    # The name instead of the path: it goes into the cache files' names, and folders are moved.
    return GPTDataset(low_level, prefix.name, indices, num_samples, Split[split], config)


def _plain_split(split: str) -> str:
    """Shares that add up to 1, in digits and dots: megatron's parser knows neither signs nor exponents."""
    weights = [float(weight) for weight in split.split(",")]
    return ",".join(f"{weight / sum(weights):.12f}" for weight in weights)


class _MegatronTokenizer:
    """What ``GPTDataset`` asks of a tokenizer. It has no ``pad``: every label counts."""

    def __init__(self, summary: DataSummary) -> None:
        self.vocab_size = summary.vocab_size
        self.eod = summary.eod
        self.unique_identifiers = {"sha256": summary.tokenizer_sha256}
