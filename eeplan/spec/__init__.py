"""What the user wants: the run file (run.yaml).

Model shape, parallel layout, training, data, exits and limits, in Megatron's own spelling. Nothing here is
measured (see ``profile``) or decided (see ``plan``). One module per section of the file; ``run`` holds the
whole.
"""

from eeplan.spec.data import DataSpec, WeightedData
from eeplan.spec.decode import DECODE_MODES, DecodeMode, DecodeSpec
from eeplan.spec.exits import (
    EXIT_FORWARDS,
    HEAD_KINDS,
    Boundary,
    DistillationSpec,
    ExitForward,
    ExitRequest,
    ExitsSpec,
    HeadKind,
    LossWeightSpec,
    WeightSchedule,
)
from eeplan.spec.fill import FillCounts, FillMode, FillPolicy, FillSpec
from eeplan.spec.limits import LimitsSpec
from eeplan.spec.model import ModelSpec
from eeplan.spec.parallel import LayerSplit, ParallelSpec
from eeplan.spec.run import RunSpec, load_run, replace_keys, with_data_paths
from eeplan.spec.search import SearchSpec
from eeplan.spec.training import Precision, TrainingSpec

__all__ = [
    "DECODE_MODES",
    "EXIT_FORWARDS",
    "HEAD_KINDS",
    "Boundary",
    "DataSpec",
    "DecodeMode",
    "DecodeSpec",
    "DistillationSpec",
    "ExitForward",
    "ExitRequest",
    "ExitsSpec",
    "FillCounts",
    "FillMode",
    "FillPolicy",
    "FillSpec",
    "HeadKind",
    "LayerSplit",
    "LimitsSpec",
    "LossWeightSpec",
    "ModelSpec",
    "ParallelSpec",
    "Precision",
    "RunSpec",
    "SearchSpec",
    "TrainingSpec",
    "WeightSchedule",
    "WeightedData",
    "load_run",
    "replace_keys",
    "with_data_paths",
]
