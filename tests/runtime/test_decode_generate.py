"""From a checkpoint to text: the result's promises, where a text ends, and what a user is told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_plan, make_run

from eeplan.errors import CheckpointError, DecodeError
from eeplan.plan import load_plan, write_plan
from eeplan.runtime import backend, checkpoint
from eeplan.runtime.decode.generate import continue_prompt, generate_options, generate_text
from eeplan.runtime.model import EarlyExitGPT, build_model, whole_model_spec
from eeplan.runtime.tokenizer import byte_tokenizer

SEQ_LENGTH = 48
PROMPT = "def main("


@dataclass(frozen=True)
class Trained:
    """A checkpoint with random but confident parameters, and the model in it."""

    folder: Path
    model: EarlyExitGPT


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("run")
    byte_tokenizer().save(folder / "tokenizer.json")
    run = make_run(
        model={
            "num_layers": 6,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "vocab_size": 257,
            # Large enough that exits disagree and some tokens are confident.
            "init_method_std": 0.5,
        },
        training__seq_length=SEQ_LENGTH,
        exits={"layers": [{"layer": 2, "head": "norm"}, {"layer": 4, "head": "mlp"}]},
        data={"data_path": str(folder / "text"), "tokenizer": str(folder / "tokenizer.json")},
    )
    write_plan(folder / "plan.yaml", make_plan(run))
    plan = load_plan(folder / "plan.yaml")
    with backend.single_process() as here:
        model = build_model(run, whole_model_spec(plan), here)
        checkpoint.save(folder / "checkpoints", 7, model, plan)
        yield Trained(folder, model)


def test_threshold_one_is_the_full_model_token_for_token(trained: Trained) -> None:
    result = generate_text(trained.folder, PROMPT, threshold=1.0, max_new_tokens=20)
    text = list(PROMPT.encode())
    with torch.no_grad():
        for _ in range(20):
            positions = torch.arange(len(text))[None]
            text.append(int(trained.model(torch.tensor([text]), positions, None)[0, -1, :257].argmax()))
    assert [token["id"] for token in result["tokens"]] == text[len(PROMPT) :]
    assert result["exits"] == {"exit_2": 0, "exit_4": 0, "final": 20}
    assert result["mean_depth"] == result["layers_per_token"] == 6


def test_result_is_consistent(trained: Trained) -> None:
    streamed: list[dict[str, Any]] = []
    result = generate_text(
        trained.folder, PROMPT, threshold=0.4, max_new_tokens=25, recompute_limit=3, on_token=streamed.append
    )
    assert streamed == result["tokens"]
    assert "".join(token["text"] for token in streamed) == result["text"]
    assert result["text"] == byte_tokenizer().decode(token["id"] for token in streamed)
    assert sum(result["exits"].values()) == len(streamed) == 25
    assert min(result["exits"].values()) > 0, "an exit that no token takes is not tested"
    depths = {"exit_2": 2, "exit_4": 4, "final": 6}
    assert result["mean_depth"] == pytest.approx(sum(depths[t["exit"]] for t in streamed) / 25)
    assert all(t["confidence"] >= 0.4 for t in streamed if t["exit"] != "final")
    assert result["layers_per_token"] >= result["mean_depth"] - 6 / 25
    assert result["tokens_per_s"] == pytest.approx(25 / result["seconds"])
    assert result["prompt_tokens"] == len(PROMPT)


def test_recompute_limit_changes_work_but_no_token(trained: Trained) -> None:
    results = [
        generate_text(trained.folder, PROMPT, threshold=0.4, max_new_tokens=25, recompute_limit=limit)
        for limit in (0, 2, 20)
    ]
    ids = [[(t["id"], t["exit"]) for t in result["tokens"]] for result in results]
    assert ids[0] == ids[1] == ids[2]
    assert results[0]["layers_per_token"] == 6
    assert len({result["layers_per_token"] for result in results}) == 3


def test_seed_decides_the_sampled_text(trained: Trained) -> None:
    def text(seed: int) -> list[int]:
        result = generate_text(
            trained.folder,
            PROMPT,
            threshold=0.9,
            max_new_tokens=20,
            temperature=2.0,
            top_k=50,
            seed=seed,
        )
        return [token["id"] for token in result["tokens"]]

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_ends_when_the_sequence_is_full(trained: Trained) -> None:
    result = generate_text(trained.folder, PROMPT, threshold=1.0, max_new_tokens=1000)
    assert (result["stopped"], len(result["tokens"])) == ("seq_length", SEQ_LENGTH - len(PROMPT) + 1)
    longest = generate_text(trained.folder, "x" * SEQ_LENGTH, threshold=1.0, max_new_tokens=5)
    assert (longest["stopped"], len(longest["tokens"])) == ("seq_length", 1)
    assert longest["layers_per_token"] is None


def test_ends_at_end_of_text(trained: Trained) -> None:
    """A head whose every position prefers the end-of-text token stops at once."""
    tokenizer = byte_tokenizer()
    forward = trained.model.final_logits

    def prefer_end(hidden: torch.Tensor) -> torch.Tensor:
        logits = forward(hidden).clone()
        logits[..., tokenizer.eod] = 1e4
        return logits

    trained.model.final_logits = prefer_end
    try:
        options = generate_options(threshold=1.0, max_new_tokens=9)
        result = continue_prompt(trained.model, tokenizer, PROMPT, options)
    finally:
        del trained.model.final_logits
    assert (result["stopped"], result["text"], len(result["tokens"])) == ("end_of_text", "", 1)


def test_padding_of_the_vocabulary_is_never_emitted(trained: Trained) -> None:
    assert trained.model.run.padded_vocab_size > 257
    forward = trained.model.final_logits
    trained.model.final_logits = lambda hidden: torch.nn.functional.pad(
        forward(hidden)[..., :257], (0, 127), value=1e4
    )
    try:
        options = generate_options(threshold=1.0, max_new_tokens=9)
        result = continue_prompt(trained.model, byte_tokenizer(), PROMPT, options)
    finally:
        del trained.model.final_logits
    assert all(token["id"] < 257 for token in result["tokens"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "x" * (SEQ_LENGTH + 1)}, f"has {SEQ_LENGTH + 1} tokens, .* sequences of {SEQ_LENGTH}"),
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"threshold": math.nan}, "threshold is nan"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"recompute_limit": -1}, "recompute limit is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
    ],
)
def test_user_errors_are_one_line(trained: Trained, changes: dict[str, Any], message: str) -> None:
    arguments = {"prompt": PROMPT, "threshold": 0.5, "max_new_tokens": 5} | changes
    with pytest.raises(DecodeError, match=message) as caught:
        generate_text(trained.folder, **arguments)
    assert "\n" not in str(caught.value)


def test_missing_checkpoint_is_an_error_not_random_weights(tmp_path: Path) -> None:
    with backend.single_process(), pytest.raises(CheckpointError, match="does not exist"):
        generate_text(tmp_path / "nothing", PROMPT, threshold=0.5, max_new_tokens=5)
