"""eeplan: plan, then train, then serve early-exit language models.

Importing this package loads neither numpy nor torch, so that the command line answers at once.
"""

__version__ = "0.1.0"
