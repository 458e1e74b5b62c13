"""`eeplan serve`: a checkpoint behind OpenAI's protocol.

One thread talks to the engine (``engine_thread``); requests come in and tokens go out on an event loop
(``app``), where every sequence has a ticket (``service``). Text is put together per choice (``generation``).
"""
