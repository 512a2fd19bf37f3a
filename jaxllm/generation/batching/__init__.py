"""Batches of independent texts; each gets the same tokens as if it ran alone.

scheduler: continuous batching; requests: its inputs and events; batched_sampling: a different
sampler in each row; multi_step: several decode steps per call. llama_batch: llama.cpp-style token
batches; llama_batch_plan: their validation. slots: microbatches and the compiled programs of both.
"""
