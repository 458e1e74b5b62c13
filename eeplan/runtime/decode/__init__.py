"""Generation with early exits.

``network`` runs the model on a few rows, ``kv`` keeps keys and values by (layer, position). ``rows`` decides
which rows a forward takes along, which is all that the modes differ in. ``policy`` decides when a token
leaves, ``sampling`` picks it. ``decoder`` and ``speculative`` are the decode loops, ``modes`` makes them by
name, and ``generate`` goes from a checkpoint and a prompt to text.
"""
