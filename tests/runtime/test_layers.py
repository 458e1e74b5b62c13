"""Which modules a model is built of: Transformer Engine's where it can be used, else this package's."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_run
from megatron.core.models.gpt import gpt_layer_specs

from eeplan.runtime.attention import SdpaCoreAttention
from eeplan.runtime.layers import RmsNorm, has_transformer_engine, layer_parts, transformer_config
from eeplan.runtime.model import global_name
from eeplan.runtime.precision import dtype_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def with_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where ``transformer_engine`` can be imported, by its look."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name == "transformer_engine" else real(name)
    )
    monkeypatch.setattr(
        gpt_layer_specs, "get_gpt_layer_with_transformer_engine_spec", lambda: SimpleNamespace(of="engine")
    )
    monkeypatch.setattr(gpt_layer_specs, "TENorm", "engine's norm", raising=False)


def test_transformer_engine_is_used_on_a_gpu(with_engine: None) -> None:
    parts: Any = layer_parts(GPU)
    assert (parts.layer.of, parts.norm, parts.norm_is_in_linear) == ("engine", "engine's norm", True)


def test_without_it_or_without_a_gpu_the_own_modules_are(with_engine: None) -> None:
    assert not has_transformer_engine(CPU)
    parts = layer_parts(CPU)
    assert parts.norm is RmsNorm
    assert parts.layer.submodules.self_attention.submodules.core_attention is SdpaCoreAttention


def test_nothing_is_used_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert layer_parts(GPU).norm is RmsNorm


@pytest.mark.parametrize(
    ("engine", "own"),
    [
        (
            "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.5.input_layernorm.weight",
        ),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.4.pre_mlp_layernorm.weight"),
        ("exits.5.mlp.linear_fc1.layer_norm_weight", "exits.5.mlp_norm.weight"),
        ("exits.5.block.mlp.linear_fc1.layer_norm_weight", "exits.5.block.pre_mlp_layernorm.weight"),
    ],
)
def test_checkpoints_name_norms_alike(engine: str, own: str) -> None:
    assert global_name(engine, first_layer=5) == own


def test_a_configuration_says_what_the_run_says() -> None:
    run = make_run(
        parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True},
        training__precision="fp16",
        training__recompute_granularity="selective",
        training__hidden_dropout=0.1,
    )
    config = transformer_config(run, 1)
    assert (config.fp16, config.bf16, config.params_dtype) == (True, False, torch.float16)
    assert (config.sequence_parallel, config.recompute_granularity) == (True, "selective")
    assert (config.hidden_dropout, config.attention_dropout) == (0.1, 0.0)
    assert dtype_of("bf16") is torch.bfloat16
    assert RmsNorm(config, 8).weight.sequence_parallel
