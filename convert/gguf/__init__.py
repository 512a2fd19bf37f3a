"""GGUF, the files of llama.cpp: read as checkpoints, and written.

header: what a file says, within bounds. blocks: the types of tensors, a row each.
"""
