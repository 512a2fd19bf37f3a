"""Batches of independent texts; each gets the same tokens as if it ran alone.

scheduler: continuous batching; requests: its inputs and events; admission: requests on their way
into a row; active: those in rows; step: one call of the loop's programs; programs, compile_ahead:
which of them are compiled, and how others are; prefix_store: beginnings of prompts that have run.
"""
