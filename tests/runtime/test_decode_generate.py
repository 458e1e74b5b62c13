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
from eeplan.runtime.decode.generate import continue_prompt, generate_text
from eeplan.runtime.decode.modes import MODES
from eeplan.runtime.decode.network import DecodeNetwork
from eeplan.runtime.decode.options import generate_options, parse_exits
from eeplan.runtime.model import EarlyExitGPT, build_model, whole_model_spec
from eeplan.runtime.tokenizer import byte_tokenizer

SEQ_LENGTH = 48
PROMPT = "def main("


def generated(checkpoint: Path, prompt: str, on_token: Any = None, **options: Any) -> dict[str, Any]:
    return generate_text(checkpoint, prompt, generate_options(**options), on_token)


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
    result = generated(trained.folder, PROMPT, threshold=1.0, max_new_tokens=20)
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
    result = generated(
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
        generated_by(
            trained.model, threshold=0.4, max_new_tokens=25, mode="kv_recompute", recompute_limit=limit
        )
        for limit in (0, 2, 20)
    ]
    ids = [[(t["id"], t["exit"]) for t in result["tokens"]] for result in results]
    assert ids[0] == ids[1] == ids[2]
    assert results[0]["layers_per_token"] == 6
    assert len({result["layers_per_token"] for result in results}) == 3


def test_seed_decides_the_sampled_text(trained: Trained) -> None:
    def text(seed: int) -> list[int]:
        result = generated(
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
    result = generated(trained.folder, PROMPT, threshold=1.0, max_new_tokens=1000)
    assert (result["stopped"], len(result["tokens"])) == ("seq_length", SEQ_LENGTH - len(PROMPT) + 1)
    longest = generated(trained.folder, "x" * SEQ_LENGTH, threshold=1.0, max_new_tokens=5)
    assert (longest["stopped"], len(longest["tokens"])) == ("seq_length", 1)
    assert longest["layers_per_token"] is None


def test_ends_at_end_of_text(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head whose every position prefers the end-of-text token stops at once."""
    tokenizer = byte_tokenizer()
    forward = DecodeNetwork.final_logits

    def prefer_end(self: DecodeNetwork, hidden: torch.Tensor) -> torch.Tensor:
        logits = forward(self, hidden)
        logits[..., tokenizer.eod] = 1e4
        return logits

    monkeypatch.setattr(DecodeNetwork, "final_logits", prefer_end)
    for mode in ("catch_up", "self_speculative"):
        options = generate_options(threshold=0.0, max_new_tokens=9, mode=mode, first_early_token=9)
        result = continue_prompt(trained.model, tokenizer, PROMPT, options)
        assert (result["stopped"], result["text"], len(result["tokens"])) == ("end_of_text", "", 1)


def test_padding_of_the_vocabulary_is_never_emitted(trained: Trained) -> None:
    """The padding's rows of the matrix would win every comparison, were they looked at."""
    assert trained.model.run.padded_vocab_size > 257
    weight = trained.model.shared_embedding_or_output_weight()
    assert weight is not None
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[257:] = 100 * weight[:127].clone()
        result = generated_by(trained.model, threshold=0.4, max_new_tokens=20)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert all(token["id"] < 257 for token in result["tokens"])
    assert result["tokens"] == generated_by(trained.model, threshold=0.4, max_new_tokens=20)["tokens"]


def generated_by(model: EarlyExitGPT, **options: Any) -> dict[str, Any]:
    return continue_prompt(model, byte_tokenizer(), PROMPT, generate_options(**options))


def test_modes_agree(trained: Trained) -> None:
    asked = {"threshold": 0.4, "max_new_tokens": 25, "recompute_limit": 3}
    by_mode = {mode: generated_by(trained.model, mode=mode, **asked) for mode in MODES}
    for name in ("id", "exit"):
        texts = {mode: [token[name] for token in result["tokens"]] for mode, result in by_mode.items()}
        assert texts["kv_recompute"] == texts["catch_up"]
        assert texts["self_speculative"] == texts["full"]
        assert texts["full"] != texts["catch_up"]
    assert by_mode["catch_up"]["layers_per_token"] < by_mode["kv_recompute"]["layers_per_token"]
    drafts = by_mode["self_speculative"]["drafts"]
    assert drafts["accepted"] == sum(token["was_draft"] for token in by_mode["self_speculative"]["tokens"])
    assert by_mode["catch_up"]["drafts"] is None


def test_a_tokens_logprob_is_its_exits(trained: Trained) -> None:
    result = generated_by(trained.model, threshold=0.4, max_new_tokens=25)
    text = list(PROMPT.encode())
    seen = set()
    for token in result["tokens"]:
        seen.add(token["exit"])
        with torch.no_grad():
            tokens = torch.tensor([text])
            hidden = trained.model.embed(tokens, torch.arange(len(text))[None])
            rotary = trained.model.rotary(len(text))
            depth = {"exit_2": 2, "exit_4": 4, "final": 6}[token["exit"]]
            hidden = trained.model.run_layers(hidden, rotary, 0, depth)
            final = trained.model.final_logits
            logits = final(hidden) if depth == 6 else trained.model.exit_logits(depth, hidden, rotary)
        expected = logits[-1, 0, :257].log_softmax(-1)[token["id"]]
        assert token["logprob"] == pytest.approx(float(expected), abs=1e-4)
        text.append(token["id"])
    assert len(seen) == 3


def test_exits_are_depths_with_commas() -> None:
    assert parse_exits(None) is None
    assert parse_exits("4,2") == [4, 2]
    with pytest.raises(DecodeError, match="exits is '2;4'"):
        parse_exits("2;4")


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
        ({"mode": "pipelines"}, "mode is 'pipelines'; expected one of full, kv_recompute"),
        ({"confidence": "luck"}, "confidence is 'luck'; expected one of max_probability"),
        ({"exits": [3]}, r"no exit at depth 3; it has exits at depths \[2, 4\]"),
        ({"exits": [2, 2]}, "expected every depth once"),
        ({"threshold": [0.5, 0.5, 0.5]}, "3 values for 2 exits"),
        ({"threshold": []}, "no value"),
        ({"first_early_token": -1}, "first early token is -1"),
        ({"repetition_penalty": 0.0}, "repetition penalty is 0.0"),
    ],
)
def test_user_errors_are_one_line(trained: Trained, changes: dict[str, Any], message: str) -> None:
    arguments = {"prompt": PROMPT, "threshold": 0.5, "max_new_tokens": 5} | changes
    with pytest.raises(DecodeError, match=message) as caught:
        generated(trained.folder, **arguments)
    assert "\n" not in str(caught.value)


def test_missing_checkpoint_is_an_error_not_random_weights(tmp_path: Path) -> None:
    with backend.single_process(), pytest.raises(CheckpointError, match="does not exist"):
        generated(tmp_path / "nothing", PROMPT, threshold=0.5, max_new_tokens=5)
