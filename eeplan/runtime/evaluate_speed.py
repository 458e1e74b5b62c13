"""How fast each threshold makes decoding: what ``eeplan evaluate`` times beside what it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eeplan.console import Progress
from eeplan.plan import Plan
from eeplan.runtime.decode.policy import ConfidenceKind
from eeplan.runtime.decode.quality import THRESHOLDS
from eeplan.runtime.decode.speed import Setting, threshold_speeds
from eeplan.runtime.model import EarlyExitGPT
from eeplan.runtime.recording import device_fingerprint

DEFAULT_SPEED_PROMPTS = 4
PROMPT_TOKENS, NEW_TOKENS = 16, 19
"""Of each prompt, where the model's sequences are long enough. After the first token 18 are timed: where all
leave early, the default recompute limit of 8 forces a full pass every 9, so none is paid for too little."""


def spread_prompts(windows: NDArray[np.int64], number: int) -> list[list[int]]:
    """Beginnings of so many sequences, spread over the text, all of one length.

    Args:
        windows: [sequences, S + 1]; with an S of 1 there are no prompts, as two tokens must fit after one.
    """
    longest = windows.shape[1] - 1
    if longest < 2:
        return []
    length = min(PROMPT_TOKENS, longest // 2)
    return [windows[index * len(windows) // number][:length].tolist() for index in range(number)]


def measured_speeds(
    model: EarlyExitGPT,
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    vocab_size: int,
    kind: ConfidenceKind,
    progress: Progress,
) -> tuple[Sequence[dict[str, Any] | None], dict[str, Any] | None]:
    """The plan's mode at every threshold, greedily, and what that was measured on; None without prompts."""
    if not prompts:
        return [None] * len(THRESHOLDS), None
    length, parameter = len(prompts[0]), next(model.parameters())
    # The last token is emitted, never fed.
    new_tokens = min(NEW_TOKENS, plan.run.training.seq_length - length + 1)
    setting = Setting(vocab_size, new_tokens, plan.run.decode.recompute_limit, kind)
    progress.line(f"decode {len(prompts)} prompts at {len(THRESHOLDS)} thresholds")
    return threshold_speeds(model, plan.run.decode.mode, THRESHOLDS, prompts, setting, progress), {
        "prompts": len(prompts),
        "prompt_tokens": length,
        "new_tokens": new_tokens,
        "device": device_fingerprint(parameter.device)["name"],
        "threads": torch.get_num_threads(),
        "dtype": str(parameter.dtype).removeprefix("torch."),
    }
