"""llama.cpp-style token batches, and its operations on sequences.

batch: decodes a batch. plan: checks it. run: the compiled programs. sequences: a cache in which
sequences share entries.
"""
