"""Everything that touches torch and megatron-core: data, model, executing plans, measuring, decoding.

Importing this package itself loads neither; its modules do, each when it is needed.
"""

import os
import warnings

# megatron-core says several times over that Transformer Engine and Apex are optional, and warns of a
# default of its own.
warnings.filterwarnings(
    "ignore",
    message=r"(?s).*(Transformer Engine|Apex|full scope is deprecated).*",
    module=r"megatron\.core.*",
)

# PyTorch's profiler, which counts allocated bytes, otherwise announces itself on stderr each time.
os.environ.setdefault("KINETO_LOG_LEVEL", "9")
