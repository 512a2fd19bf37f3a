"""llama.cpp-style token batches, and its operations on sequences.

batch: decode a batch. plan: its validation. run: the compiled programs. sequences: a cache whose
sequences share entries.
"""
