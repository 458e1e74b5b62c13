"""Several datasets in one run: Megatron's samples, exact proportions, one order for any number of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from builders import make_run
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import numbered_texts, run_for

from eeplan.errors import DataError, SchemaError
from eeplan.runtime import batches as module
from eeplan.runtime import blend
from eeplan.runtime.data import (
    BatchStream,
    DataFiles,
    RankInfo,
    build_batches,
    build_from_texts,
    check_data,
    read_summary,
)
from eeplan.runtime.tokenizer import byte_tokenizer, train_bpe
from eeplan.schema import validate
from eeplan.spec import RunSpec, with_data_paths

WEIGHTS = {"a": 5.0, "b": 3.0, "c": 2.0}
"""The datasets differ in size and share the name of their files; text tells which one a sample is from."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("blend")
    for number, name in enumerate(WEIGHTS):
        texts = [text.replace("d", name) for text in numbered_texts(20 + 5 * number, seed=number)]
        build_from_texts(texts, root / name / "text", byte_tokenizer())
    return root


def blended(folder: Path, weights: dict[str, float] = WEIGHTS, **overrides: Any) -> RunSpec:
    run = run_for(DataFiles(folder / "a" / "text"), split=overrides.pop("split", "60,20,20"), **overrides)
    paths = [{"path": str(folder / name / "text"), "weight": weight} for name, weight in weights.items()]
    data = {**run.data.model_dump(), "data_path": paths}
    return validate({**run.model_dump(mode="json"), "data": data}, RunSpec, "run")


def samples(stream: BatchStream) -> list[bytes]:
    return [bytes(row.tolist()) for batch in stream for row in batch["tokens"].clamp(max=255)]


def source(sample: bytes) -> str:
    (name,) = {chr(byte) for byte in sample} & set(WEIGHTS)
    return name


def test_every_stretch_holds_the_proportions(folder: Path) -> None:
    sources = [source(sample) for sample in samples(build_batches(blended(folder, training__train_iters=20)))]
    assert len(sources) == 320
    for end in range(1, len(sources) + 1):
        counts = Counter(sources[:end])
        for name, weight in WEIGHTS.items():
            assert abs(counts[name] - end * weight / 10) < 1.0, (name, end)


@settings(max_examples=30, deadline=None)
@given(weights=st.lists(st.floats(0.01, 100.0), min_size=2, max_size=6), num_samples=st.integers(1, 400))
def test_proportions_are_exact_for_any_weights(
    tmp_path_factory: pytest.TempPathFactory, weights: list[float], num_samples: int
) -> None:
    shares = [weight / sum(weights) for weight in weights]
    dataset_N, sample_N = blend.indices(shares, num_samples, tmp_path_factory.mktemp("any"))
    counts = Counter(dataset_N.tolist())
    for number, share in enumerate(shares):
        assert abs(counts[number] - num_samples * share) <= len(weights) - 1
        taken = [s for d, s in zip(dataset_N, sample_N, strict=True) if d == number]
        assert taken == list(range(len(taken))), "each dataset in its own order, nothing left out"
        assert len(taken) <= blend.sizes(shares, num_samples)[number]


@pytest.mark.parametrize("train_iters", [3, 40])
def test_samples_are_those_of_megatrons_blend(folder: Path, train_iters: int) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    run = blended(folder, training__train_iters=train_iters)
    prefixes = [str(folder / name / "text") for name in WEIGHTS]
    config = GPTDatasetConfig(
        random_seed=run.training.seed,
        sequence_length=32,
        blend=(prefixes, list(WEIGHTS.values())),
        split="60,20,20",
        tokenizer=module._MegatronTokenizer(read_summary(DataFiles(folder / "a" / "text"))),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [train_iters * 16, 4 * 16, 4 * 16]
    stock = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    for split, dataset, size in zip(("train", "valid", "test"), stock, sizes, strict=True):
        expected = [bytes(dataset[i]["tokens"].clamp(max=255).tolist()) for i in range(size)]
        assert samples(build_batches(run, split=split)) == expected  # type: ignore[arg-type]


def test_parts_share_no_document(folder: Path) -> None:
    run = blended(folder)
    seen = {
        split: set(chain.from_iterable(part.split(b" ") for part in samples(build_batches(run, split=split))))  # type: ignore[arg-type]
        for split in ("train", "valid", "test")
    }
    words = {split: {word for word in found if word.count(b"w") == 1} for split, found in seen.items()}
    # A word names dataset, document and place; the first and last of a sample may be cut.
    documents = {
        split: {w.split(b"w")[0] for w in found if w[:1] in b"abc"} for split, found in words.items()
    }
    whole = {split: {d for d in found if len(d) > 2} for split, found in documents.items()}
    assert not whole["train"] & whole["test"]
    assert not whole["train"] & whole["valid"]
    assert whole["test"]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
def test_order_is_independent_of_the_ranks_and_exact_across_a_resume(
    folder: Path, before: int, after: int
) -> None:
    """Some iterations on one number of data ranks, the others on another."""
    run = blended(folder, training__train_iters=5)
    whole = samples(build_batches(run))

    def on(size: int, start: int, stop: int) -> list[bytes]:
        layout = blended(folder, training__train_iters=5, parallel__data_parallel_size=size)
        streams = [
            build_batches(layout, rank_info=RankInfo(rank, size), start_sample=start) for rank in range(size)
        ]
        dealt: list[bytes] = []
        while streams[0].consumed_samples < stop:
            for stream in streams:
                dealt += [bytes(row.tolist()) for row in next(stream)["tokens"].clamp(max=255)]
        assert {stream.consumed_samples for stream in streams} == {stop}
        return dealt

    middle = 3 * 16
    assert on(before, 0, middle) + on(after, middle, 80) == whole
    assert on(after, middle - 16, 80) != whole[middle:], "control: another position reads other samples"


def test_seed_and_weights_change_the_order_and_nothing_else_does(folder: Path) -> None:
    first = samples(build_batches(blended(folder)))
    assert samples(build_batches(blended(folder))) == first
    assert samples(build_batches(blended(folder, training__seed=2))) != first
    assert samples(build_batches(blended(folder, {"a": 2.0, "b": 3.0, "c": 5.0}))) != first
    same_shares = {name: weight / 10 for name, weight in WEIGHTS.items()}
    assert samples(build_batches(blended(folder, same_shares))) == first


def test_one_dataset_in_a_list_is_that_dataset(folder: Path) -> None:
    alone = run_for(DataFiles(folder / "b" / "text"), split="60,20,20")
    assert samples(build_batches(blended(folder, {"b": 0.3}))) == samples(build_batches(alone))


def test_paths_of_all_datasets_are_changed(folder: Path) -> None:
    run = blended(folder)
    moved = with_data_paths(run, lambda path: path.replace(str(folder), "/elsewhere"))
    assert [one.path for one in moved.data.datasets] == [f"/elsewhere/{name}/text" for name in WEIGHTS]
    assert moved.data.tokenizer == "/elsewhere/a/text.tokenizer.json"
    assert [one.weight for one in moved.data.datasets] == pytest.approx([0.5, 0.3, 0.2])


def test_errors_name_the_dataset(folder: Path, tmp_path: Path) -> None:
    assert [summary.documents for summary in check_data(blended(folder))] == [20, 25, 30]
    with pytest.raises(DataError, match=r"d/text\.json does not exist"):
        check_data(blended(folder, {**WEIGHTS, "d": 1.0}))
    texts = numbered_texts(20)
    build_from_texts(texts, tmp_path / "other" / "text", train_bpe(texts, 300))
    foreign = with_data_paths(
        blended(folder), lambda path: str(tmp_path / "other" / "text") if path.endswith("c/text") else path
    )
    with pytest.raises(DataError, match=r"is not the one that .*other/text\.bin was built with"):
        check_data(foreign)
    build_from_texts(["short"], tmp_path / "short" / "text", byte_tokenizer())
    short = with_data_paths(
        blended(folder), lambda path: str(tmp_path / "short" / "text") if path.endswith("b/text") else path
    )
    with pytest.raises(DataError, match=r"the train part .* documents of .*short/text with 6 tokens"):
        check_data(short)


@pytest.mark.parametrize(
    ("data_path", "message"),
    [
        ([], "data.data_path"),
        ([{"path": "x", "weight": 0.0}], r"data\.data_path\[0\]\.weight"),
        ([{"path": "x"}], r"data\.data_path\[0\]\.weight"),
        (3, "3 is no data; expected a prefix"),
        ([{"path": "x", "weight": 1.0}, {"path": "x", "weight": 2.0}], "names x twice"),
    ],
)
def test_impossible_lists_are_refused(data_path: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message) as caught:
        make_run(data={"data_path": data_path, "tokenizer": "t"})
    assert "\n" not in str(caught.value)
