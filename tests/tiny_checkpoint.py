"""A checkpoint of a tiny model whose exits mostly, but not always, agree with its last layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from builders import make_plan, make_run

from eeplan.plan import load_plan, write_plan
from eeplan.runtime import backend, checkpoint
from eeplan.runtime.model import EarlyExitGPT, build_model, whole_model_spec
from eeplan.runtime.tokenizer import byte_tokenizer

SEQ_LENGTH = 64
EXITS = ({"layer": 2, "head": "norm"}, {"layer": 4, "head": "norm"})
CHANGE = 0.35
"""Of what the layers add to the hidden states: the smaller, the more exits agree."""


@contextmanager
def tiny_model(folder: Path, seq_length: int = SEQ_LENGTH, **model: Any) -> Iterator[EarlyExitGPT]:
    """Write a run's folder with a checkpoint: 6 layers, byte-level, exits at 2 and 4; the model in it."""
    byte_tokenizer().save(folder / "tokenizer.json")
    shape = {"num_layers": 6, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 257}
    run = make_run(
        model=shape | {"init_method_std": 0.5} | model,
        training__seq_length=seq_length,
        exits={"layers": list(EXITS)},
        data={"data_path": str(folder / "text"), "tokenizer": str(folder / "tokenizer.json")},
    )
    write_plan(folder / "plan.yaml", make_plan(run))
    plan = load_plan(folder / "plan.yaml")
    with backend.single_process() as here:
        built = build_model(run, whole_model_spec(plan), here)
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                    parameter.mul_(CHANGE)
        checkpoint.save(folder / "checkpoints", 7, built, plan)
        yield built
