"""Everything that touches torch and megatron-core: data, model, executing plans, measuring, decoding.

Importing this package itself loads neither; its modules do, each when it is needed.
"""

import warnings

# megatron-core says several times over that Transformer Engine and Apex are optional, and warns of a
# default of its own.
warnings.filterwarnings(
    "ignore",
    message=r"(?s).*(Transformer Engine|Apex|full scope is deprecated).*",
    module=r"megatron\.core.*",
)
