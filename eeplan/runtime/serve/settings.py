"""What a server is told, and what it knows about its model."""

from __future__ import annotations

from dataclasses import dataclass, field

from eeplan.errors import DecodeError
from eeplan.runtime.decode.certificate import Certificate
from eeplan.runtime.decode.policy import Candidates
from eeplan.runtime.serve.chat import ChatTemplate
from eeplan.runtime.tokenizer import Tokenizer
from eeplan.spec import Precision

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request, and all together, may take."""

    max_running: int = 8
    """Sequences that decode at once."""
    max_waiting: int = 64
    """Sequences that wait for a place; more are answered with 429."""
    max_tokens: int = 4096
    """New tokens of one sequence."""
    max_choices: int = 16
    """Sequences of one request: prompts times n."""
    max_body_bytes: int = 4 << 20
    retry_after_s: int = 1
    """What a 429 tells the client."""
    grace_s: float = 30.0
    """After SIGTERM, how long running answers may take to finish."""
    stall_s: float = 120.0
    """A step of the engine that takes longer counts as its death."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_tokens", "max_choices", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise DecodeError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in ("max_waiting", "grace_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise DecodeError(f"{name} is {getattr(self, name)}; expected a number from 0 upwards")


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind a server, as far as answers need it."""

    name: str
    """As clients call it."""
    checkpoint: str
    num_layers: int
    exit_depths: tuple[int, ...]
    seq_length: int
    """Longest prompt and answer together."""
    tokenizer: Tokenizer
    template: ChatTemplate
    certificate: Certificate | None
    thresholds: tuple[float, ...]
    """Where a request names none: one for all exits, or one for each."""
    created: int
    """Seconds since 1970."""
    modes: tuple[str, ...]
    default_mode: str
    dtype: Precision = "fp32"
    """What it computes in."""
    candidates: Candidates = field(default_factory=Candidates)
    """Where a request names none; only for modes that check exits with them."""
    frequent: tuple[int, ...] = ()
    """Tokens that candidates of source ``frequent`` come from; none if it was not asked to know them."""

    @property
    def is_calibrated(self) -> bool:
        """Whether the default thresholds are those of the certificate."""
        return self.certificate is not None and self.thresholds == self.certificate.thresholds
