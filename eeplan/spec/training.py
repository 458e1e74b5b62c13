"""Batch sizes, precision, optimizer and schedule."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from eeplan.schema import Model
from eeplan.spec.fields import Fraction

Precision = Literal["fp32", "bf16", "fp16"]
"""Of parameters and activations; gradients and optimizer state are fp32."""


class TrainingSpec(Model):
    """Batch sizes, precision, optimizer and schedule of one training run."""

    micro_batch_size: PositiveInt
    global_batch_size: PositiveInt
    seq_length: PositiveInt
    train_iters: PositiveInt
    precision: Precision = "fp32"
    loss_scale: PositiveFloat | None = None
    """Factor on every loss with fp16; None lets it follow the gradients, from ``initial_loss_scale`` on."""
    initial_loss_scale: PositiveFloat = 2.0**32
    min_loss_scale: PositiveFloat = 1.0
    loss_scale_window: PositiveInt = 1000
    """Iterations without overflow after which the loss scale doubles."""
    hysteresis: PositiveInt = 2
    """Overflows after which the loss scale halves."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Activations that are computed again in the backward: a whole layer's, or its attention's alone."""
    hidden_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    attention_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    seed: Annotated[int, Field(ge=1)] = 1234
    lr: PositiveFloat = 1e-3
    min_lr: Fraction = 0.0
    lr_warmup_iters: Annotated[int, Field(ge=0)] = 0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    weight_decay: Fraction = 0.1
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    adam_eps: PositiveFloat = 1e-8
    clip_grad: Fraction = 1.0
    log_interval: PositiveInt = 10
    eval_iters: PositiveInt = 4
    """Global batches of an evaluation: of validation text before the first and after the last iteration, of
    test text after the last."""
    eval_interval: PositiveInt | None = None
    """Iterations between further evaluations; None: none."""
    save_interval: PositiveInt | None = None
    """Iterations between checkpoints; None saves after the last iteration only."""
    async_save: bool = False
    """Write checkpoints in the background from a copy in memory, while training goes on."""
    wandb_project: str | None = None
    """Also log to this project of Weights & Biases; ``wandb`` must be installed."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints that stay on disk. With two, a damaged newest one still leaves one to go on from."""

    @model_validator(mode="after")
    def _loss_scale_can_fall(self) -> Self:
        if self.min_loss_scale > self.initial_loss_scale:
            raise ValueError(
                f"min_loss_scale {self.min_loss_scale:g} exceeds initial_loss_scale "
                f"{self.initial_loss_scale:g}; lower it"
            )
        return self

    @property
    def element_bytes(self) -> int:
        """Bytes of one parameter or activation."""
        return 4 if self.precision == "fp32" else 2
