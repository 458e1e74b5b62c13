"""Generation with early exits.

``kv`` keeps keys and values by (layer, position); ``policy`` decides when a token leaves; ``sampling`` picks
it; ``recompute`` is the decode loop that runs missing layers again together with the next token; ``generate``
goes from a checkpoint and a prompt to text.
"""
