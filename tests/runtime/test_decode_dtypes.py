"""A checkpoint decoded in another kind of number than it was trained in: every mode, within that kind.

In 16 bits the attention of several rows at once rounds otherwise than that of one row, so a tie may fall the
other way. What holds is the rule: a token leaves at the first exit that reaches the threshold, and is that
exit's likeliest, as far as the kind of number tells; both are looked at with its own numbers, row by row.
"""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_chain import chained
from decode_models import ALL_HEADS, SEQ_LENGTH, build, small_run
from decode_requests import play
from small_data import numbered_texts, write_jsonl
from tiny_checkpoint import tiny_model

from eeplan.cli import main
from eeplan.console import PlainProgress
from eeplan.errors import DecodeError
from eeplan.runtime import backend
from eeplan.runtime.decode.calibration import asked_for, calibrate
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.engine import LocalEngine
from eeplan.runtime.decode.modes import ALL_MODES
from eeplan.runtime.decode.network import DecodeNetwork, Transformer
from eeplan.runtime.decode.options import dtype_name, generate_options, parse_dtype
from eeplan.runtime.decode.pipeline import PipelineEngine
from eeplan.runtime.decode.policy import confidence_of
from eeplan.runtime.decode.requests import Engine, Request
from eeplan.runtime.decode.weights import Weights, weights_of
from eeplan.runtime.model import EarlyExitGPT
from eeplan.runtime.serve.app import model_facts
from eeplan.runtime.serve.opening import opened

SHORT = [torch.bfloat16, torch.float16]
KINDS = [torch.float32, *SHORT]
THRESHOLD = 0.5
PROMPTS = [tuple(random.Random(seed).choices(range(13), k=1 + seed % 7)) for seed in range(10)]


@dataclass(frozen=True)
class Cast:
    """One model, and what decodes with it."""

    weights: Weights
    engines: dict[str, Engine]

    def tokens(self, mode: str, prompt: Sequence[int], threshold: float, limit: int = 3) -> list[Emission]:
        options = generate_options(threshold=threshold, max_new_tokens=99, mode=mode, recompute_limit=limit)
        engine = self.engines.get(mode, self.engines["one"])
        return play(engine, [Request(tuple(prompt), options)])[0]


@pytest.fixture(scope="module")
def casts() -> Iterator[dict[torch.dtype, Cast]]:
    """One model of float32, cast at load; for stages the model itself is cast, as they read a model."""
    found = {}
    with backend.single_process() as here:
        model, _ = build(here, small_run(ALL_HEADS, untied=True), torch.float32)
        for dtype in KINDS:
            weights = weights_of(model, SEQ_LENGTH, dtype=dtype)
            same, _ = build(here, small_run(ALL_HEADS, untied=True), torch.float32)
            stages = chained(same.to(dtype), 3, random.Random(1), SEQ_LENGTH)
            found[dtype] = Cast(weights, {"one": LocalEngine(weights), "pipeline": stages})
        yield found


def rule_errors(cast: Cast, prompt: Sequence[int], found: Sequence[Emission], threshold: float) -> list[str]:
    """Where tokens break the rule by more than the kind of number can tell; all layers, one row at a time."""
    weights = cast.weights
    network = DecodeNetwork.of(Transformer(weights), SEQ_LENGTH)
    text, wrong = [*prompt, *(emission.token for emission in found)], []
    eps = torch.finfo(weights.dtype).eps
    for position, token in enumerate(text[:-1]):
        with torch.no_grad():
            logits = logits_at(network, token, position)
        if position < len(prompt) - 1:
            continue
        emission = found[position - len(prompt) + 1]
        for depth, logits_V in logits.items():
            # Of the largest logit a few last places; a confidence moves by at most a quarter of that.
            slack = 8 * eps * max(1.0, float(logits_V.abs().max()))
            confidence = confidence_of(logits_V)
            if depth == emission.depth:
                if depth < network.num_layers and confidence < threshold - slack:
                    wrong.append(f"{position}: left at {depth} with {confidence}")
                if float(logits_V[emission.token]) < float(logits_V.max()) - slack:
                    wrong.append(f"{position}: {emission.token} is not the likeliest at {depth}")
                break
            if confidence > threshold + slack:
                wrong.append(f"{position}: did not leave at {depth} with {confidence}")
    return wrong


def logits_at(network: DecodeNetwork, token: int, position: int) -> dict[int, torch.Tensor]:
    """Of every exit by depth, the final one last."""
    hidden, depth, logits = network.embed((token,)), 0, {}
    for exit_ in network.exits:
        hidden = network.run_layers(hidden, position, depth, exit_.depth)
        depth = exit_.depth
        read = network.run_block(depth, hidden, position) if exit_.head == "block" else hidden
        logits[depth] = network.exit_logits(depth, read)[0]
    hidden = network.run_layers(hidden, position, depth, network.num_layers)
    return logits | {network.num_layers: network.final_logits(hidden)[0]}


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("dtype", KINDS, ids=dtype_name)
def test_every_mode_follows_the_rule(casts: dict[torch.dtype, Cast], dtype: torch.dtype, mode: str) -> None:
    never = mode in ("full", "self_speculative")
    exits = set()
    for prompt in PROMPTS[:4]:
        found = casts[dtype].tokens(mode, prompt, THRESHOLD)
        assert rule_errors(casts[dtype], prompt, found, 2.0 if never else THRESHOLD) == []
        exits |= {emission.exit for emission in found}
    assert exits == {"final"} if never else len(exits) > 2


def test_negative_control_another_rule(casts: dict[torch.dtype, Cast]) -> None:
    for dtype in SHORT:
        found = casts[dtype].tokens("catch_up", PROMPTS[3], 0.8)
        assert rule_errors(casts[dtype], PROMPTS[3], found, 0.8) == []
        assert rule_errors(casts[dtype], PROMPTS[3], found, 0.4) != []
        found[4:5] = [casts[dtype].tokens("full", (1,), 1.0)[0]]
        found[5:6] = [casts[dtype].tokens("full", (2,), 1.0)[1]]
        assert rule_errors(casts[dtype], PROMPTS[3], found, 0.8) != []


@pytest.mark.parametrize("dtype", KINDS, ids=dtype_name)
def test_modes_say_the_same(casts: dict[torch.dtype, Cast], dtype: torch.dtype) -> None:
    """Speculative text is the full model's; completing later changes nothing. In 16 bits up to rare ties."""
    pairs = []
    for prompt in PROMPTS:

        def said(mode: str, threshold: float, limit: int = 3, prompt: Any = prompt) -> list[tuple[int, str]]:
            emissions = casts[dtype].tokens(mode, prompt, threshold, limit)
            return [(emission.token, emission.exit) for emission in emissions]

        pairs.append((said("self_speculative", THRESHOLD), said("full", 1.0)))
        # With limit 0 every token runs through all layers on its own: the naive rule.
        naive = said("catch_up", THRESHOLD, 0)
        pairs += [(said(mode, THRESHOLD), naive) for mode in ("catch_up", "kv_recompute", "pipeline")]
    differing = sum(mine != other for mine, other in pairs)
    assert differing <= (0 if dtype == torch.float32 else len(pairs) // 10)


def test_kinds_of_numbers_differ(casts: dict[torch.dtype, Cast]) -> None:
    """Each really computes in its own."""
    shown = {
        dtype: tuple(e.confidence for e in casts[dtype].tokens("full", PROMPTS[3], 1.0)) for dtype in KINDS
    }
    assert len(set(shown.values())) == 3
    for dtype in KINDS:
        assert casts[dtype].weights.dtype == dtype
        engine = casts[dtype].engines["one"]
        assert isinstance(engine, LocalEngine)
        number = engine.submit(Request((1,), generate_options(threshold=1.0, max_new_tokens=2)))
        engine.step()
        assert engine.decoder(number).rows.network.store.entries_L2GPD.dtype == dtype
        engine.cancel(number)


def test_names() -> None:
    assert [parse_dtype(name, "bf16") for name in (None, "fp32", "fp16")] == ["bf16", "fp32", "fp16"]
    assert [dtype_name(dtype) for dtype in (*KINDS, torch.float64)] == ["fp32", "bf16", "fp16", "float64"]
    with pytest.raises(DecodeError, match="dtype is 'float16'; expected one of fp32, bf16, fp16"):
        parse_dtype("float16", "fp32")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, EarlyExitGPT]]:
    folder = tmp_path_factory.mktemp("dtypes")
    with tiny_model(folder) as model:
        yield folder, model


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_processes_cast_as_one_does(tiny: tuple[Path, EarlyExitGPT], dtype: str) -> None:
    """Bit by bit in mode full, where rows go alone in both."""
    request = Request(tuple(b"def main("), generate_options(threshold=1.0, max_new_tokens=12, mode="full"))
    with opened(tiny[0], dtype=dtype) as (served, engine):
        alone = play(engine, [request])[0]
        assert served.dtype == dtype
    with opened(tiny[0], dtype=dtype, pipeline_size=2) as (_, engine):
        assert isinstance(engine, PipelineEngine)
        assert play(engine, [request])[0] == alone


def test_numbers_that_do_not_fit(tiny: tuple[Path, EarlyExitGPT]) -> None:
    model = tiny[1]
    norm = model.decoder.final_layernorm.weight
    kept = norm.detach().clone()
    try:
        with torch.no_grad():
            norm[0] = 1e6
        weights_of(model, SEQ_LENGTH, dtype=torch.bfloat16)
        with pytest.raises(DecodeError, match="has numbers beyond 65504"):
            weights_of(model, SEQ_LENGTH, dtype=torch.float16)
    finally:
        with torch.no_grad():
            norm.copy_(kept)


def test_the_command_line(tiny: tuple[Path, EarlyExitGPT], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(tiny[0]), "--prompt", "def main(", "--max-new-tokens", "5", "--json"]
    for dtype in ("fp32", "bf16"):
        assert main([*command, "--dtype", dtype]) == 0
        assert json.loads(capsys.readouterr().out)["dtype"] == dtype
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "fp32"
    for name in ("generate", "chat", "serve"):
        more = ["--prompt", "x"] if name == "generate" else []
        assert main([name, str(tiny[0]), "--dtype", "int8", *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "dtype is 'int8'; expected one of fp32, bf16, fp16" in line


def test_a_certificate_holds_for_its_own_kind_only(
    tiny: tuple[Path, EarlyExitGPT], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tiny[0], folder)
    write_jsonl(folder / "held_out.jsonl", numbered_texts(120, words=20))
    calibration = asked_for(risk=0.2, confidence=0.8)
    certificate, _ = calibrate(folder, folder / "held_out.jsonl", calibration, PlainProgress(io.StringIO()))
    assert certificate.selection.passed
    command = ["generate", str(folder), "--prompt", "def main(", "--max-new-tokens", "5", "--json"]
    for own in ([], ["--dtype", "fp32"]):
        assert main([*command, *own]) == 0
        said = capsys.readouterr()
        assert "calibrated: with confidence 0.8" in said.err
        assert json.loads(said.out)["threshold"] != 1.0
    assert main([*command, "--dtype", "bf16"]) == 0
    said = capsys.readouterr()
    assert "the checkpoint's certificate holds for fp32, not for bf16; it is not used" in said.err
    assert json.loads(said.out)["threshold"] == 1.0
    assert main([*command, "--dtype", "bf16", "--threshold", "0.5"]) == 0
    assert "certificate" not in capsys.readouterr().err
    assert main([*command, "--dtype", "bf16", "--threshold", "calibrated"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the certificate holds for fp32, in which it was made, and not for bf16" in line
    with opened(folder, dtype="bf16", threshold=[str(one) for one in certificate.thresholds]) as (served, _):
        facts = model_facts(served)["eeplan"]
        assert (facts["dtype"], facts["calibrated"], facts["certificate"]) == ("bf16", False, None)
    with opened(folder) as (served, _):
        facts = model_facts(served)["eeplan"]
        assert (facts["dtype"], facts["calibrated"]) == ("fp32", True)
