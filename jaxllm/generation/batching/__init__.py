"""Batches of independent texts; each gets the same tokens as if it ran alone.

scheduler: continuous batching; requests: its inputs and events; active: the requests in its rows;
prefix_store: beginnings of prompts that have run; compile_ahead: its programs, before requests need
them.
"""
