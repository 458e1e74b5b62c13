"""Small datasets for tests, and the run that reads them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from builders import make_plan, make_run

from eeplan.plan import Plan, load_plan, write_plan
from eeplan.runtime.data import DataFiles, build_from_texts
from eeplan.runtime.tokenizer import END_OF_TEXT, BpeTokenizer, Tokenizer, byte_tokenizer
from eeplan.spec import RunSpec


def numbered_texts(count: int, words: int = 60, seed: int = 0) -> list[str]:
    """Documents in which every word names its document and place, so that any slice says where it is from."""
    rng = random.Random(seed)
    return [
        " ".join(f"d{document}w{word}" for word in range(rng.randint(words // 2, words)))
        for document in range(count)
    ]


def build_small(
    folder: Path, texts: Sequence[str] | None = None, tokenizer: Tokenizer | None = None
) -> DataFiles:
    """A dataset ``folder/text`` of 40 documents, byte-level unless said otherwise."""
    files = DataFiles(folder / "text")
    build_from_texts(texts or numbered_texts(40), files.prefix, tokenizer or byte_tokenizer())
    return files


def run_for(files: DataFiles, **overrides: Any) -> RunSpec:
    """A run over ``files``: sequences of 32, microbatches of 2, global batches of 16, one data rank."""
    settings: dict[str, Any] = {
        "model__vocab_size": 257,
        "data": {
            "data_path": str(files.prefix),
            "tokenizer": str(files.tokenizer),
            "split": overrides.pop("split", "80,20,0"),
        },
    }
    return make_run(**(settings | overrides))


def plan_two_layers(folder: Path, **overrides: Any) -> Plan:
    """Data and the plan of two layers of 16 channels in one process, an exit after the first.

    They are ``folder/text`` and ``folder/plan.yaml``; data that is there already is left alone.
    """
    files = DataFiles(folder / "text")
    settings: dict[str, Any] = {
        "model__num_layers": 2,
        "model__hidden_size": 16,
        "model__num_attention_heads": 2,
        "parallel__pipeline_model_parallel_size": 1,
        "training__seq_length": 16,
        "exits": {"layers": [{"layer": 1}]},
    }
    run = run_for(files if files.tokenizer.exists() else build_small(folder), **(settings | overrides))
    write_plan(folder / "plan.yaml", make_plan(run))
    return load_plan(folder / "plan.yaml")


def write_jsonl(path: Path, texts: Sequence[str], key: str = "text") -> Path:
    """One object a line."""
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def wide_tokenizer(vocab_size: int) -> BpeTokenizer:
    """A BPE of any vocabulary size: bytes, pairs such as ``Ab``, and pairs of pairs such as ``AbCd``.

    Ids grow with the alphabet, so a text of late pairs of pairs has ids close to ``vocab_size``.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    upper, lower = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"
    pairs = [x + y for x in upper for y in lower]
    quads = itertools.islice(itertools.product(pairs, pairs), vocab_size - 1 - len(alphabet) - len(pairs))
    merges = [(pair[0], pair[1]) for pair in pairs] + [*quads]
    tokens = [*alphabet, *(first + second for first, second in merges)]
    library = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END_OF_TEXT])
    return BpeTokenizer(library)
