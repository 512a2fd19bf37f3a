"""GGUF, the files of llama.cpp: read as checkpoints, and written.

header: what a file says, within bounds. blocks: the types of tensors, a row each. stored: a tensor
as lazy tensors of ours. names: what tensors are called, by family; architecture, families: an
architecture a row; settings: its keys as a configuration of ours; rotary: its rotary part.
vocabulary: the tokenizer and the chat template; pre: the ways to split a text, by name. opening:
all of it as a checkpoint. writing: a checkpoint as a file; super_blocks: numbers as its K types;
tensor_types: mixtures of types; vocabulary_keys: its tokenizer.
"""
