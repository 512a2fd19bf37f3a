"""LongNet's dilated attention and Infini-attention, as kinds of attention (`AttentionKind`).

settings: the fields in a model's configuration. dilated: LongNet in a layer; dilated_attention: its
arithmetic, by blocks of consecutive positions (dilated_blocks) or arbitrary ones
(dilated_gathered), after a dilation_pattern. infini: Infini-attention in a layer; memory: its
compressive memory; segments: texts of any length in a small cache. conversion, command: `jaxllm
infini`, which gives a dense model a memory.
"""
