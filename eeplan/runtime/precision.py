"""Kinds of numbers: what a run's ``precision`` means in torch."""

from __future__ import annotations

import torch

from eeplan.spec import Precision


def dtype_of(precision: Precision) -> torch.dtype:
    """Of parameters, activations and messages between stages."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
