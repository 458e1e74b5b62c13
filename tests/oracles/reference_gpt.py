"""An early-exit GPT in plain PyTorch on one process: the oracle for losses, gradients and decoding.

Llama-like (RMSNorm, RoPE, SwiGLU, grouped-query attention, no biases), written for reading, not for speed.
Parameters are a flat dict under the names that the whole Megatron model would have, so that a gradient of
any rank can be compared by name. It imports neither megatron nor eeplan's runtime and works in float64.

Shape suffixes: B sequences, S positions, H hidden, N query heads, G query groups, D channels per head,
V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eeplan.plan import PlannedExit
from eeplan.spec import ModelSpec, RunSpec

Parameters = dict[str, Tensor]


def requested_exits(run: RunSpec) -> tuple[PlannedExit, ...]:
    """The exits that a run places by hand, defaults filled in; stages hold equally many layers."""
    model, wanted = run.model, run.exits
    layers_per_stage = model.num_layers // run.parallel.pipeline_model_parallel_size
    exits = []
    for request in sorted(wanted.layers, key=lambda r: r.depth):
        weight = request.depth / model.num_layers if request.weight is None else request.weight
        exits.append(
            PlannedExit(
                layer=request.layer,
                boundary=request.boundary,
                depth=request.depth,
                stage=(request.layer - 1) // layers_per_stage,
                head=request.head or wanted.head,
                tied=not wanted.untie_exit_output_weights if request.tied is None else request.tied,
                target_weight=weight,
                effective_weight=weight,
            )
        )
    return tuple(exits)


def parameter_shapes(run: RunSpec, exits: Sequence[PlannedExit]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in a fixed order. Matrices are [out, in] as in torch."""
    model = run.model
    vocabulary = (run.padded_vocab_size, model.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": vocabulary}
    for i in range(model.num_layers):
        shapes |= _layer_shapes(f"decoder.layers.{i}.", model)
    shapes["decoder.final_layernorm.weight"] = (model.hidden_size,)
    if model.untie_embeddings_and_output_weights:
        shapes["output_layer.weight"] = vocabulary
    for exit_ in exits:
        prefix = f"exits.{exit_.depth}."
        if exit_.head == "mlp":
            shapes[prefix + "mlp_norm.weight"] = (model.hidden_size,)
            shapes |= _mlp_shapes(prefix, model)
        if exit_.head == "block":
            shapes |= _layer_shapes(prefix + "block.", model)
        if exit_.head != "minimal":
            shapes[prefix + "norm.weight"] = (model.hidden_size,)
        if not exit_.tied:
            shapes[prefix + "output_layer.weight"] = vocabulary
    return shapes


def _layer_shapes(prefix: str, model: ModelSpec) -> dict[str, tuple[int, ...]]:
    heads = model.num_attention_heads + 2 * model.query_groups
    return {
        prefix + "input_layernorm.weight": (model.hidden_size,),
        prefix + "self_attention.linear_qkv.weight": (heads * model.head_dim, model.hidden_size),
        prefix + "self_attention.linear_proj.weight": (model.hidden_size, model.hidden_size),
        prefix + "pre_mlp_layernorm.weight": (model.hidden_size,),
    } | _mlp_shapes(prefix, model)


def _mlp_shapes(prefix: str, model: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "mlp.linear_fc1.weight": (2 * model.ffn_size, model.hidden_size),
        prefix + "mlp.linear_fc2.weight": (model.hidden_size, model.ffn_size),
    }


def init_parameters(
    run: RunSpec,
    seed: int,
    dtype: torch.dtype = torch.float32,
    exits: Sequence[PlannedExit] | None = None,
    std: float | None = None,
) -> Parameters:
    """Random parameters, drawn in float64 and rounded to ``dtype``, that require gradients.

    Norm weights scatter around 1, because at exactly 1 a norm that was left out of the scale goes unseen.

    Args:
        exits: default, the ones that the run places by hand.
        std: of the matrices; default, the run's ``init_method_std``. Larger makes confident models.
    """
    exits = requested_exits(run) if exits is None else exits
    std = run.model.init_method_std if std is None else std
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, shape in parameter_shapes(run, exits).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        value = 1.0 + 0.1 * noise if len(shape) == 1 else std * noise
        parameters[name] = value.to(dtype).requires_grad_()
    return parameters


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def rotary(x_BSND: Tensor, base: int) -> Tensor:
    """Rotary position embedding, half-split: channel c turns with channel c + D/2.

    Angles are float32 whatever the model's precision, as in Megatron.
    """
    _, seq_length, _, dim = x_BSND.shape
    inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    angles_SD = torch.outer(torch.arange(seq_length, dtype=torch.float32), inv_freq).repeat(1, 2)
    cos_SD, sin_SD = angles_SD.cos().to(x_BSND.dtype), angles_SD.sin().to(x_BSND.dtype)
    first, second = x_BSND.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_BSND * cos_SD[:, None] + turned * sin_SD[:, None]


def attention(params: Parameters, prefix: str, model: ModelSpec, x_BSH: Tensor) -> Tensor:
    """Causal self-attention; ``linear_qkv`` is packed per query group as [query heads, key, value]."""
    batch, seq_length, _ = x_BSH.shape
    groups, dim = model.query_groups, model.head_dim
    per_group = model.num_attention_heads // groups
    packed = (x_BSH @ params[prefix + "linear_qkv.weight"].T).view(
        batch, seq_length, groups, per_group + 2, dim
    )
    q_BSND = packed[..., :per_group, :].reshape(batch, seq_length, model.num_attention_heads, dim)
    k_BSGD, v_BSGD = packed[..., per_group, :], packed[..., per_group + 1, :]
    q_BSND, k_BSGD = rotary(q_BSND, model.rotary_base), rotary(k_BSGD, model.rotary_base)
    k_BSND = k_BSGD.repeat_interleave(per_group, dim=2)
    v_BSND = v_BSGD.repeat_interleave(per_group, dim=2)
    scores_BNST = torch.einsum("bsnd,btnd->bnst", q_BSND, k_BSND) / dim**0.5
    future_ST = torch.ones(seq_length, seq_length, dtype=torch.bool).triu(1)
    weights_BNST = scores_BNST.masked_fill(future_ST, float("-inf")).softmax(-1)
    mixed_BSND = torch.einsum("bnst,btnd->bsnd", weights_BNST, v_BSND)
    return mixed_BSND.reshape(batch, seq_length, -1) @ params[prefix + "linear_proj.weight"].T


def swiglu(params: Parameters, prefix: str, x_BSH: Tensor) -> Tensor:
    """SwiGLU MLP; ``linear_fc1`` is packed as [gate, up]."""
    gate, up = (x_BSH @ params[prefix + "linear_fc1.weight"].T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ params[prefix + "linear_fc2.weight"].T


def layer(params: Parameters, prefix: str, model: ModelSpec, x_BSH: Tensor) -> Tensor:
    """One transformer layer with pre-norm residual branches."""
    eps = model.layernorm_epsilon
    normed = rms_norm(x_BSH, params[prefix + "input_layernorm.weight"], eps)
    x_BSH = x_BSH + attention(params, prefix + "self_attention.", model, normed)
    normed = rms_norm(x_BSH, params[prefix + "pre_mlp_layernorm.weight"], eps)
    return x_BSH + swiglu(params, prefix + "mlp.", normed)


def tied_matrix_name(model: ModelSpec) -> str:
    """The vocabulary matrix of the final head and of tied exits."""
    untied = model.untie_embeddings_and_output_weights
    return "output_layer.weight" if untied else "embedding.word_embeddings.weight"


def embed(params: Parameters, tokens_BS: Tensor) -> Tensor:
    """Hidden states before the first layer [B, S, H]."""
    return params["embedding.word_embeddings.weight"][tokens_BS]


def exit_logits(params: Parameters, model: ModelSpec, exit_: PlannedExit, x_BSH: Tensor) -> Tensor:
    """Logits [B, S, V] of an early exit from the hidden states after ``exit_.depth`` layers.

    A tied exit shares the final head's matrix.
    """
    prefix, eps = f"exits.{exit_.depth}.", model.layernorm_epsilon
    if exit_.head == "mlp":
        normed = rms_norm(x_BSH, params[prefix + "mlp_norm.weight"], eps)
        x_BSH = x_BSH + swiglu(params, prefix + "mlp.", normed)
    if exit_.head == "block":
        x_BSH = layer(params, prefix + "block.", model, x_BSH)
    if exit_.head != "minimal":
        x_BSH = rms_norm(x_BSH, params[prefix + "norm.weight"], eps)
    matrix = tied_matrix_name(model) if exit_.tied else prefix + "output_layer.weight"
    return x_BSH @ params[matrix].T


def final_logits(params: Parameters, model: ModelSpec, x_BSH: Tensor) -> Tensor:
    """Logits [B, S, V] of the last layer's head."""
    x_BSH = rms_norm(x_BSH, params["decoder.final_layernorm.weight"], model.layernorm_epsilon)
    return x_BSH @ params[tied_matrix_name(model)].T


def logits(
    params: Parameters, run: RunSpec, exits: Sequence[PlannedExit], tokens_BS: Tensor
) -> dict[str, Tensor]:
    """Logits [B, S, V] of every exit, shallowest first: ``exit_<depth>`` …, ``final``."""
    by_depth = {exit_.depth: exit_ for exit_ in exits}
    x_BSH, result = embed(params, tokens_BS), {}
    for i in range(run.model.num_layers):
        x_BSH = layer(params, f"decoder.layers.{i}.", run.model, x_BSH)
        if (exit_ := by_depth.get(i + 1)) is not None:
            result[f"exit_{exit_.depth}"] = exit_logits(params, run.model, exit_, x_BSH)
    return result | {"final": final_logits(params, run.model, x_BSH)}


def mean_loss(logits_BSV: Tensor, labels_BS: Tensor, loss_mask_BS: Tensor) -> Tensor:
    """Cross entropy in nats over the padded vocabulary, averaged over the tokens that the mask counts."""
    wide = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    losses_BS = F.cross_entropy(wide.flatten(0, 1), labels_BS.flatten(), reduction="none").view_as(labels_BS)
    mask_BS = loss_mask_BS.to(losses_BS.dtype)
    return (losses_BS * mask_BS).sum() / mask_BS.sum()


def losses(
    params: Parameters,
    run: RunSpec,
    exits: Sequence[PlannedExit],
    tokens_BS: Tensor,
    labels_BS: Tensor,
    loss_mask_BS: Tensor,
) -> dict[str, Tensor]:
    """Mean loss in nats of every exit: ``exit_<depth>`` …, ``final``."""
    every = logits(params, run, exits, tokens_BS)
    return {name: mean_loss(value, labels_BS, loss_mask_BS) for name, value in every.items()}


def total_loss(
    params: Parameters,
    run: RunSpec,
    exits: Sequence[PlannedExit],
    tokens_BS: Tensor,
    labels_BS: Tensor,
    loss_mask_BS: Tensor,
) -> Tensor:
    """Training objective: final loss plus effectively weighted early losses (paper 2)."""
    every = losses(params, run, exits, tokens_BS, labels_BS, loss_mask_BS)
    return every["final"] + sum(e.effective_weight * every[f"exit_{e.depth}"] for e in exits)


def gradients(loss: Tensor, params: Parameters) -> Parameters:
    """Gradient of a scalar by every parameter; parameters that it does not reach get zeros."""
    found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    return {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(params.items(), found, strict=True)
    }
