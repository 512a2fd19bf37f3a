"""Batches of independent texts; each gets the same tokens as if it ran alone.

serve: continuous batching; requests: its inputs and events; draws: a different sampler in each row;
burst: several decode steps per call. batch: llama.cpp-style token batches; plan: their validation.
places: microbatches and the compiled programs of both.
"""
