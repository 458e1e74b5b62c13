"""The model that decoding is timed on: 11.5 million parameters, trained with two exits from the start.

Eight layers on two pipeline stages, a vocabulary of 4,096, the text of ``campaigns.text`` in sections; exits
after a quarter and half of the layers, as in EE-LLM's runs. Every step that is done is not done again::

    PYTHONPATH=tests python -m campaigns.decode_model --texts FOLDER --out FOLDER
    eeplan calibrate FOLDER/run --data FOLDER/data/text --risk 0.05 --confidence 0.95
    eeplan bench decode FOLDER/run --json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from campaigns.text import read_corpus, sections

from eeplan.console import open_progress
from eeplan.files import write_bytes
from eeplan.plan import load_plan, write_plan
from eeplan.profile import load_profile
from eeplan.runtime.data import build_from_texts
from eeplan.runtime.preflight import check_training, run_ranks
from eeplan.runtime.profiler import measure
from eeplan.runtime.tokenizer import train_bpe
from eeplan.schema import write_yaml
from eeplan.sim.planner import make_plan
from eeplan.spec import (
    DataSpec,
    ExitRequest,
    ExitsSpec,
    ModelSpec,
    ParallelSpec,
    RunSpec,
    TrainingSpec,
    load_run,
)

VOCAB_SIZE = 4096


def decode_model_run(train_iters: int) -> RunSpec:
    """Data paths are relative to the campaign's folder."""
    return RunSpec(
        schema_version=1,
        name="decode-model",
        model=ModelSpec(
            num_layers=8,
            hidden_size=320,
            num_attention_heads=5,
            vocab_size=VOCAB_SIZE,
            init_method_std=0.03,
        ),
        parallel=ParallelSpec(pipeline_model_parallel_size=2),
        training=TrainingSpec(
            micro_batch_size=4,
            global_batch_size=16,
            seq_length=128,
            train_iters=train_iters,
            lr=2e-3,
            min_lr=1e-4,
            lr_warmup_iters=20,
            eval_iters=16,
            log_interval=10,
            save_interval=100,
        ),
        data=DataSpec(data_path="data/text", tokenizer="data/text.tokenizer.json"),
        exits=ExitsSpec(layers=(ExitRequest(layer=2), ExitRequest(layer=4))),
    )


def train_decode_model(texts: Path, out: Path, train_iters: int) -> None:
    """What ``out`` lacks: ``data``, ``profile.yaml``, ``plan.yaml`` and ``run`` with the profile beside."""
    if not (out / "data/text.json").is_file():
        parts = sections(read_corpus(texts).texts)
        build_from_texts(parts, out / "data/text", train_bpe(parts, VOCAB_SIZE))
    if not (out / "plan.yaml").is_file():
        write_yaml(out / "run.yaml", decode_model_run(train_iters))
        run, run_sha256 = load_run(out / "run.yaml")
        if not (out / "profile.yaml").is_file():
            write_yaml(out / "profile.yaml", measure(run))
        write_plan(out / "plan.yaml", make_plan(run, run_sha256, *load_profile(out / "profile.yaml")))
    check_training(out / "plan.yaml", out / "run")
    with open_progress() as progress:
        run_ranks(out / "plan.yaml", load_plan(out / "plan.yaml"), out / "run", progress)
    write_bytes(out / "run" / "profile.yaml", (out / "profile.yaml").read_bytes())


def main() -> None:
    """Train it."""
    parser = argparse.ArgumentParser(prog="campaigns.decode_model")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train-iters", type=int, default=600)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    train_decode_model(arguments.texts, arguments.out, arguments.train_iters)


if __name__ == "__main__":
    main()
