"""Microbatches: megatron's own samples, dealt as Megatron deals them, from any sample on, by many at once."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from small_data import build_small, numbered_texts, run_for, wide_tokenizer

from eeplan.errors import DataError
from eeplan.runtime import batches as module
from eeplan.runtime.data import BatchStream, DataFiles, Microbatch, RankInfo, build_batches, read_summary
from eeplan.runtime.tokenizer import byte_tokenizer
from eeplan.spec import RunSpec


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> DataFiles:
    return build_small(tmp_path_factory.mktemp("batches"))


def rows(stream: BatchStream) -> list[list[int]]:
    """Tokens and last label of every sample left in the stream."""
    return [
        [*tokens.tolist(), int(labels[-1])]
        for batch in stream
        for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True)
    ]


def test_shapes_types_and_labels(files: DataFiles) -> None:
    stream = build_batches(run_for(files, training__train_iters=3))
    assert len(stream) == 3 * 8
    batches: list[Microbatch] = list(stream)
    assert len(batches) == 24
    assert len(stream) == 0
    for batch in batches:
        assert {key: tuple(value.shape) for key, value in batch.items()} == dict.fromkeys(batch, (2, 32))
        assert [batch[key].dtype for key in ("tokens", "labels", "position_ids")] == [torch.int64] * 3
        assert batch["loss_mask"].dtype == torch.float32
        assert bool((batch["loss_mask"] == 1).all())
        assert batch["position_ids"].tolist() == [list(range(32))] * 2
        assert torch.equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])
    with pytest.raises(StopIteration):
        next(stream)


@pytest.mark.parametrize("train_iters", [5, 60])
def test_samples_are_those_of_megatrons_builder(files: DataFiles, train_iters: int) -> None:
    """Within one pass over the data and over several."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    run = run_for(files, training__train_iters=train_iters)
    config = GPTDatasetConfig(
        random_seed=run.training.seed,
        sequence_length=32,
        blend=([str(files.prefix)], None),
        split="80,20,0",
        path_to_cache=str(files.prefix.parent / "stock"),
        tokenizer=module._MegatronTokenizer(read_summary(files)),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [train_iters * 16, 4 * 16, 0]
    stock = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    for split, dataset, size in (("train", stock[0], sizes[0]), ("valid", stock[1], sizes[1])):
        expected = [
            [*dataset[i]["tokens"].tolist(), int(dataset[i]["labels"][-1])]  # type: ignore[index]
            for i in range(size)
        ]
        assert rows(build_batches(run, split=split)) == expected  # type: ignore[arg-type]
    # Control: another seed is another order.
    assert rows(build_batches(run_for(files, training__train_iters=train_iters, training__seed=7))) != rows(
        build_batches(run)
    )


def test_one_pass_sees_every_token_once_and_validation_sees_others(files: DataFiles) -> None:
    """Documents name themselves, so the parts can be told apart in the text."""
    tokenizer = byte_tokenizer()
    seen: dict[str, set[str]] = {}
    for split in ("train", "valid"):
        stream = build_batches(run_for(files, training__train_iters=15), split=split)  # type: ignore[arg-type]
        samples = rows(stream)
        words = " ".join(tokenizer.decode(sample) for sample in samples)
        # A word cut by a sample's edge may miss its document's last digit; whole ones have 'w' behind it.
        seen[split] = {word.split("w")[0] for word in words.split() if word.startswith("d") and "w" in word}
        if split == "train":
            assert len({tuple(sample) for sample in samples}) == len(samples) == 240
    assert seen["train"] <= {f"d{n}" for n in range(32)}
    assert seen["valid"] <= {f"d{n}" for n in range(32, 40)}
    assert len(seen["train"]) > 20
    assert len(seen["valid"]) >= 5


@settings(max_examples=15, deadline=None)
@given(consumed=st.integers(0, 40).map(lambda groups: groups * 4), rank=st.integers(0, 1))
def test_resuming_continues_exactly(files: DataFiles, consumed: int, rank: int) -> None:
    run = run_for(files, parallel__data_parallel_size=2, training__train_iters=10)
    place = RankInfo(rank, 2)
    whole = list(build_batches(run, rank_info=place))
    tail = build_batches(run, rank_info=place, start_sample=consumed)
    assert tail.consumed_samples == consumed
    assert len(tail) == len(whole) - consumed // 4
    for ours, theirs in zip(tail, whole[consumed // 4 :], strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)  # type: ignore[literal-required]
    assert tail.consumed_samples == 160
    # Control: one microbatch off is another stream.
    if consumed < 156:
        tail.seek(consumed + 4)
        assert not torch.equal(next(tail)["tokens"], whole[consumed // 4]["tokens"])


@settings(max_examples=12, deadline=None)
@given(
    micro_batch_size=st.sampled_from([1, 2, 3]),
    data_size=st.sampled_from([1, 2, 4]),
    num_microbatches=st.integers(1, 3),
)
def test_data_ranks_share_out_each_global_batch(
    files: DataFiles, micro_batch_size: int, data_size: int, num_microbatches: int
) -> None:
    """In the order of one rank, and each sample to exactly one rank."""
    batch_size = micro_batch_size * data_size * num_microbatches

    def run(size: int) -> RunSpec:
        return run_for(
            files,
            parallel__data_parallel_size=size,
            training__micro_batch_size=micro_batch_size,
            training__global_batch_size=batch_size,
            training__train_iters=3,
        )

    alone = rows(build_batches(run(1)))
    ranks = [rows(build_batches(run(data_size), rank_info=RankInfo(r, data_size))) for r in range(data_size)]

    def dealt(ranks: list[list[list[int]]]) -> list[list[int]]:
        starts = range(0, len(ranks[0]), micro_batch_size)
        return [row for at in starts for rank in ranks for row in rank[at : at + micro_batch_size]]

    assert dealt(ranks) == alone
    # Control: it matters which rank has which share.
    assert data_size == 1 or dealt(ranks[::-1]) != alone
    per_rank = batch_size // data_size
    for iteration in range(3):
        whole = alone[iteration * batch_size : (iteration + 1) * batch_size]
        parts = [row for rank in ranks for row in rank[iteration * per_rank : (iteration + 1) * per_rank]]
        assert sorted(parts) == sorted(whole)


@pytest.mark.parametrize("position", [-4, 2, 3, 100_000])
def test_positions_off_the_grid_are_refused(files: DataFiles, position: int) -> None:
    run = run_for(files, parallel__data_parallel_size=2)
    with pytest.raises(ValueError, match="expected a multiple of 4"):
        build_batches(run, rank_info=RankInfo(0, 2), start_sample=position)


def test_a_rank_outside_the_run_is_refused(files: DataFiles) -> None:
    for place in (RankInfo(0, 2), RankInfo(1, 1)):
        with pytest.raises(ValueError, match="does not fit data_parallel_size 1"):
            build_batches(run_for(files), rank_info=place)


def test_large_ids_reach_the_model(tmp_path: Path) -> None:
    tokenizer = wide_tokenizer(70_000)
    text = b" ".join(tokenizer.token_bytes(range(69_000, 69_999))).decode()
    files = build_small(tmp_path, [text], tokenizer)
    run = run_for(files, split="1,0,0", model__vocab_size=70_000, training__train_iters=5)
    assert max(max(row) for row in rows(build_batches(run))) > 65_535


def test_ids_outside_the_vocabulary_are_caught(tmp_path: Path) -> None:
    """Damage that check_data does not look for: same size, other content."""
    files = build_small(tmp_path)
    run = run_for(files)
    next(build_batches(run))
    np.full(files.bin.stat().st_size // 2, 999, np.uint16).tofile(files.bin)
    with pytest.raises(DataError, match=r"token id 999 in sample 0 of .*text\.bin is outside"):
        next(build_batches(run))


def test_an_empty_part_is_refused(tmp_path: Path) -> None:
    files = build_small(tmp_path)
    with pytest.raises(DataError, match=r"the valid part of data\.split '1,0,0' is empty"):
        build_batches(run_for(files, split="1,0,0"), split="valid")


def _cached(files: DataFiles) -> list[str]:
    return sorted(os.listdir(files.prefix.parent / "cache"))


def test_index_is_built_once_and_moves_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    files = build_small(tmp_path / "a")
    before = rows(build_batches(run_for(files)))
    cached = _cached(files)
    assert len(cached) == 1
    shutil.move(tmp_path / "a", tmp_path / "b")
    moved = DataFiles(tmp_path / "b" / "text")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the index was built again")

    monkeypatch.setattr(np, "save", never)
    assert rows(build_batches(run_for(moved))) == before
    assert _cached(moved) == cached
    with pytest.raises(AssertionError):  # control: another seed needs another index
        build_batches(run_for(moved, training__seed=2))


def test_data_built_anew_is_not_read_through_the_old_index(tmp_path: Path) -> None:
    files = build_small(tmp_path, numbered_texts(40, words=90))
    run = run_for(files)
    before = rows(build_batches(run))
    build_small(tmp_path, numbered_texts(40, words=60, seed=1))
    shutil.copytree(files.prefix.parent, tmp_path / "fresh", ignore=shutil.ignore_patterns("cache"))
    fresh = rows(build_batches(run_for(DataFiles(tmp_path / "fresh" / "text"))))
    assert rows(build_batches(run)) == fresh != before


def test_an_interrupted_build_leaves_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = build_small(tmp_path)
    save, calls = np.save, []

    def save_two(path: str, *args: Any, **kwargs: Any) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        save(path, *args, **kwargs)

    monkeypatch.setattr(np, "save", save_two)
    with pytest.raises(KeyboardInterrupt):
        build_batches(run_for(files))
    assert _cached(files) == []
    monkeypatch.undo()
    assert len(build_batches(run_for(files))) == 32


def test_cache_errors_are_one_line(tmp_path: Path) -> None:
    files = build_small(tmp_path)
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write the index cache into .*make its folder writable"):
        build_batches(run_for(files))
    (tmp_path / "cache").unlink()
    build_batches(run_for(files))
    (damaged,) = (tmp_path / "cache").glob("*/0/*shuffle_index.npy")
    damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(DataError, match=r"cannot be read .* delete the folder") as error:
        build_batches(run_for(files))
    assert "\n" not in str(error.value)


def test_many_may_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thread finds no index and builds one; one wins, all read the same."""
    files = build_small(tmp_path)
    run = run_for(files)
    together, rename = threading.Barrier(4, timeout=30), os.rename
    renames: list[bool] = []

    def rename_together(source: str, target: str) -> None:
        together.wait()
        try:
            rename(source, target)
        except OSError:
            renames.append(False)
            raise
        renames.append(True)

    monkeypatch.setattr(os, "rename", rename_together)
    results: list[list[list[int]]] = []
    threads = [threading.Thread(target=lambda: results.append(rows(build_batches(run)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(renames) == [False, False, False, True]
    assert len(results) == 4
    assert all(result == results[0] for result in results)
    assert len(_cached(files)) == 1


def test_ranks_of_a_process_group(tmp_path: Path) -> None:
    """Two gloo processes: rank 0 writes the index, both get their share, both get rank 0's error."""
    files = build_small(tmp_path)
    run = run_for(files, parallel__data_parallel_size=2, training__train_iters=2)
    bad = run.model_copy(update={"data": run.data.model_copy(update={"data_path": str(tmp_path / "absent")})})
    for name, one in (("good", run), ("bad", bad)):
        (tmp_path / f"{name}.json").write_text(one.model_dump_json())
    run_ranks("batches_worker", [tmp_path], nproc=2)
    for number in range(2):
        seen = json.loads((tmp_path / f"seen.{number}.json").read_text())
        alone = build_batches(run, rank_info=RankInfo(number, 2))
        assert seen["tokens"] == [batch["tokens"].tolist() for batch in alone]
        assert seen["valid"] == 16
        assert "absent.json does not exist" in seen["error"]
    assert len(_cached(files)) == 2
