"""The ranks of test_batches: what each gets of a dataset, and what it is told of one that is not there.

``main`` gets a folder that holds ``good.json`` and ``bad.json``, two runs; rank r writes ``seen.r.json``.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from eeplan.errors import DataError
from eeplan.runtime.data import RankInfo, build_batches
from eeplan.spec import RunSpec


def main(folder: Path) -> None:
    good, bad = (
        RunSpec.model_validate_json((folder / f"{name}.json").read_text()) for name in ("good", "bad")
    )
    dist.init_process_group("gloo")
    here = RankInfo(dist.get_rank(), dist.get_world_size())
    seen = {
        "tokens": [batch["tokens"].tolist() for batch in build_batches(good, rank_info=here)],
        "valid": len(build_batches(good, rank_info=here, split="valid")),
        "error": "",
    }
    try:
        build_batches(bad, rank_info=here)
    except DataError as error:
        seen["error"] = str(error)
    (folder / f"seen.{here.data_rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
