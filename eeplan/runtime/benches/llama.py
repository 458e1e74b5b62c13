"""The same model in Hugging Face ``transformers``: what decoding without early exits is held against.

Needs the extra ``eeplan[bench]``. Weights, dtype and threads are the same; before anything is timed, the
logits are compared.

Shape suffixes: G key/value heads, X queries, key and value of a group, D head channels, H hidden.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eeplan.errors import DecodeError
from eeplan.runtime.model import EarlyExitGPT

MOST_DIFFERENT = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of logits, relative to the largest logit, that rounding explains."""


def has_transformers() -> bool:
    """Whether ``transformers`` is installed."""
    return importlib.util.find_spec("transformers") is not None


def equal_llama(model: EarlyExitGPT, vocab_size: int) -> Any:
    """A ``LlamaForCausalLM`` with the parameters of ``model``, exits and vocabulary padding left out.

    Args:
        model: the whole model, on this process.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = model.run.model
    config: Any = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.query_groups,
        head_dim=shape.head_dim,
        hidden_act="silu",
        max_position_embeddings=model.run.training.seq_length,
        rms_norm_eps=shape.layernorm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(shape.rotary_base)},
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config._attn_implementation = "sdpa"
    dtype = next(model.parameters()).dtype
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    llama = llama.to(dtype).to_empty(device="cpu")
    # Made from the configuration, not a parameter; the meta device left it without numbers.
    llama.model.rotary_emb = type(llama.model.rotary_emb)(config)
    llama.load_state_dict(_llama_parameters(model, vocab_size), strict=True)
    return llama.eval()


def require_equal_logits(model: EarlyExitGPT, llama: Any, prompt: Sequence[int]) -> float:
    """Largest difference of the two models' logits over a prompt, relative to the largest logit.

    Raises:
        DecodeError: it is more than rounding.
    """
    tokens_BS = torch.tensor([list(prompt)])
    vocab_size = llama.config.vocab_size
    with torch.no_grad():
        positions_BS = torch.arange(len(prompt))[None]
        hidden_SBH = model.embed(tokens_BS, positions_BS)
        hidden_SBH = model.run_layers(hidden_SBH, model.rotary(len(prompt)), 0, model.run.model.num_layers)
        ours_SV = model.final_logits(hidden_SBH)[:, 0, :vocab_size].float()
        theirs_SV = llama(tokens_BS).logits[0].float()
    difference = float((ours_SV - theirs_SV).abs().max() / theirs_SV.abs().max())
    if not difference <= MOST_DIFFERENT[next(model.parameters()).dtype]:
        raise DecodeError(
            f"the model built in transformers gives other logits (relative difference {difference:.2g}), so "
            "that its speed says nothing; the installed transformers may differ from the pinned version"
        )
    return difference


def generate_times(llama: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[float]:
    """Seconds at which each new token was there, counted from the call; greedy, with a KV cache.

    Args:
        prompts: of one length; they are one batch.
    """
    watch = _Watch(len(prompts))
    with torch.no_grad():
        llama.generate(
            torch.tensor([list(prompt) for prompt in prompts]),
            attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.int64),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            stopping_criteria=[watch],
        )
    return watch.seconds


class _Watch:
    """A stopping criterion of ``generate`` that never stops and keeps the time of each call."""

    def __init__(self, sequences: int) -> None:
        self._never = torch.zeros(sequences, dtype=torch.bool)
        self._start_s = time.perf_counter()
        self.seconds: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.seconds.append(time.perf_counter() - self._start_s)
        return self._never


def _llama_parameters(model: EarlyExitGPT, vocab_size: int) -> dict[str, Tensor]:
    """Parameters under Llama's names: Megatron keeps a group's queries, key and value in one matrix, and the
    gate above the up projection; positions are rotated by halves in both."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shape = model.run.model
    shared = model.shared_embedding_or_output_weight()
    assert shared is not None, "the whole model holds the matrix of its final head"
    found = {
        "model.embed_tokens.weight": named["embedding.word_embeddings.weight"][:vocab_size],
        "model.norm.weight": named["decoder.final_layernorm.weight"],
        "lm_head.weight": shared.detach()[:vocab_size],
    }
    for index in range(shape.num_layers):
        ours, theirs = f"decoder.layers.{index}.", f"model.layers.{index}."
        qkv_GXDH = named[f"{ours}self_attention.linear_qkv.weight"].view(
            shape.query_groups, -1, shape.head_dim, shape.hidden_size
        )
        query, key, value = qkv_GXDH[:, :-2], qkv_GXDH[:, -2], qkv_GXDH[:, -1]
        gate, up = named[f"{ours}mlp.linear_fc1.weight"].chunk(2)
        found |= {
            f"{theirs}self_attn.q_proj.weight": query.reshape(-1, shape.hidden_size),
            f"{theirs}self_attn.k_proj.weight": key.reshape(-1, shape.hidden_size),
            f"{theirs}self_attn.v_proj.weight": value.reshape(-1, shape.hidden_size),
            f"{theirs}self_attn.o_proj.weight": named[f"{ours}self_attention.linear_proj.weight"],
            f"{theirs}mlp.gate_proj.weight": gate,
            f"{theirs}mlp.up_proj.weight": up,
            f"{theirs}mlp.down_proj.weight": named[f"{ours}mlp.linear_fc2.weight"],
            f"{theirs}input_layernorm.weight": named[f"{ours}input_layernorm.weight"],
            f"{theirs}post_attention_layernorm.weight": named[f"{ours}pre_mlp_layernorm.weight"],
        }
    return found
