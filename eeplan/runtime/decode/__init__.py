"""Generation with early exits.

``weights`` are a model's or a stage's parameters, ``network`` runs them on a few rows, ``products`` keeps
rows from depending on one another, ``kv`` keeps keys and values by (layer, position). ``rows`` decides which
rows a forward takes along, which is all that the modes of one process differ in. ``policy`` and
``exit_check`` decide when a token leaves, ``sampling`` picks it. ``decoder`` and ``speculative`` are the
decode loops, written as programs (``ops``) that run alone or in ``lockstep``; ``modes`` makes them by name.

``requests`` is what an engine promises. ``engine`` decodes many sequences on one process, ``pipeline`` on
stages: ``stage_rows`` is what a stage does, ``stage_worker``, ``stage_processes`` and ``channel`` are its
processes and their messages, ``team`` shares a stage between several.

``generate`` goes from a checkpoint and a prompt to text.
"""
