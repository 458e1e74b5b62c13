"""The whole way from nothing to a report, on text that every Python brings: ``eeplan demo``.

Uses the same functions as the commands, in the same order, and leaves what they would leave: ``run.yaml``,
``data/``, ``profile.yaml``, ``plan.yaml``, ``run/`` and the report.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eeplan.console import Progress
from eeplan.files import require_writable_folder, write_bytes, write_text
from eeplan.schema import write_yaml
from eeplan.spec import DataSpec, ExitsSpec, ModelSpec, ParallelSpec, RunSpec, TrainingSpec, load_run

CORPUS_BYTES = 500_000
"""Python's language reference and a little of its library: little enough to learn from in two minutes."""
VOCAB_SIZE = 1024
PROMPTS = ("The with statement", "A function is", "Return a list of")
THRESHOLD = 0.3
TEMPERATURE = 0.6
NEW_TOKENS = 64
BUSY_MACHINE = 0.1
"""Share of disturbed samples from which on the demo says so."""


def demo_run(vocab_size: int = VOCAB_SIZE) -> RunSpec:
    """The demo's run file; data paths are relative to its folder.

    Args:
        vocab_size: of the tokenizer that the data was built with.
    """
    return RunSpec(
        schema_version=1,
        name="demo",
        model=ModelSpec(
            num_layers=8, hidden_size=192, num_attention_heads=4, vocab_size=vocab_size, init_method_std=0.07
        ),
        parallel=ParallelSpec(pipeline_model_parallel_size=2),
        training=TrainingSpec(
            micro_batch_size=4,
            global_batch_size=32,
            seq_length=128,
            train_iters=130,
            lr=3e-3,
            min_lr=3e-4,
            lr_warmup_iters=10,
            log_interval=10,
            eval_iters=2,
        ),
        data=DataSpec(data_path="data/text", tokenizer="data/text.tokenizer.json"),
        exits=ExitsSpec(count=2),
    )


def run_demo(out: Path, *, progress: Progress) -> dict[str, Any]:
    """Build data, profile, plan, train, generate and report; everything stays under ``out``.

    A demo that ran there before is replaced.

    Returns:
        The report's summary, and ``steps``: seconds of each step.

    Raises:
        EeplanError: from any of the steps.
    """
    from eeplan.runtime.preflight import require_runtime

    require_writable_folder(out, "demo folder")
    require_runtime()
    clock = _Steps(progress)
    with clock.step("1/6 build data from Python's own text"):
        run_path = _build_data(out, progress)
    with clock.step("2/6 measure what each op costs here"):
        _profile(run_path, out / "profile.yaml", progress)
    with clock.step("3/6 plan: where exits go, and why"):
        _plan(run_path, out, progress)
    with clock.step("4/6 train on two pipeline stages"):
        _train(out, progress)
    with clock.step("5/6 generate with early exits"):
        _generate(out / "run", progress)
    with clock.step("6/6 write the report"):
        from eeplan.report.build import write_report

        summary = write_report(out / "run", out)
    return {**summary, "steps": clock.seconds}


class _Steps:
    """Progress that remembers how long each step took."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        start_s = time.perf_counter()
        with self._progress.step(title, announce=True):
            yield
        self.seconds[title] = time.perf_counter() - start_s


def _build_data(out: Path, progress: Progress) -> Path:
    """Corpus, tokenizer, dataset and run file; the run file's path."""
    from eeplan.runtime.corpus import demo_corpus
    from eeplan.runtime.data import build_from_texts
    from eeplan.runtime.tokenizer import train_bpe

    texts = [text for _, text in demo_corpus(CORPUS_BYTES)]
    tokenizer = train_bpe(texts, VOCAB_SIZE)
    built = build_from_texts(texts, out / "data" / "text", tokenizer, progress=progress.update)
    progress.line(
        f"{built.documents:,} documents, {built.tokens:,} tokens of {built.vocab_size:,} kinds; "
        f"unigram entropy {built.unigram_entropy_nats:.2f} nats"
    )
    write_yaml(out / "run.yaml", demo_run(built.vocab_size), "The run of `eeplan demo`.")
    return out / "run.yaml"


def _profile(run_path: Path, profile_path: Path, progress: Progress) -> None:
    from eeplan.runtime.profiler import measure

    run, _ = load_run(run_path)
    profile = measure(run, progress=progress.update)
    write_yaml(profile_path, profile, "Written by `eeplan demo`.")
    if profile.disturbed_share > BUSY_MACHINE:
        progress.line(
            f"other work on this machine disturbed {profile.disturbed_share:.0%} of the samples; they are "
            "left out, but training next to that work will be slower than planned"
        )


def _plan(run_path: Path, out: Path, progress: Progress) -> None:
    from eeplan.plan import write_plan
    from eeplan.profile import load_profile
    from eeplan.sim.planner import make_plan

    run, run_sha256 = load_run(run_path)
    profile, profile_sha256 = load_profile(out / "profile.yaml")
    plan = write_plan(out / "plan.yaml", make_plan(run, run_sha256, profile, profile_sha256))
    for decision in plan.decisions:
        progress.line(f"{decision.subject}: {decision.choice}; {decision.reason}")


def _train(out: Path, progress: Progress) -> None:
    from eeplan.runtime.preflight import check_training, run_ranks

    run_dir = out / "run"
    # An earlier demo's run; its profile, and so its plan, was another.
    if (run_dir / "plan.yaml").is_file():
        shutil.rmtree(run_dir)
    plan = check_training(out / "plan.yaml", run_dir)
    run_ranks(out / "plan.yaml", plan, run_dir, progress)
    write_bytes(run_dir / "profile.yaml", (out / "profile.yaml").read_bytes())


def _generate(run_dir: Path, progress: Progress) -> None:
    """Continue each prompt, show the text, and leave ``samples.json`` for the report."""
    from eeplan.runtime.decode.generate import generate_text
    from eeplan.runtime.decode.options import generate_options

    samples = []
    for index, prompt in enumerate(PROMPTS):
        progress.update(index, len(PROMPTS), prompt)
        options = generate_options(
            threshold=THRESHOLD, max_new_tokens=NEW_TOKENS, temperature=TEMPERATURE, seed=index + 1
        )
        result = generate_text(run_dir, prompt, options)
        samples.append({key: result[key] for key in ("prompt", "threshold", "tokens", "tokens_per_s")})
        early = sum(token["exit"] != "final" for token in result["tokens"])
        progress.line(
            f"{prompt!r} + {result['text']!r} ({early} of {len(result['tokens'])} tokens left early)"
        )
    write_text(run_dir / "samples.json", json.dumps(samples, ensure_ascii=False, indent=1) + "\n")
