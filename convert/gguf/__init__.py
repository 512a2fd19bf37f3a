"""GGUF, llama.cpp's file format: reader and writer.

Reading: header parses a file within bounds; blocks: a table of tensor types; tensors: tensors as
lazy tensors; names: tensor names, by family; architecture, families, gemma4: a table of
architectures; settings: keys to configurations and back; rotary: rotary settings; tokenizer_read:
tokenizer and chat template; pre_tokenizers: pre-tokenizers, by name; reader: whole files as
checkpoints. Writing: writer writes files; tensor_types: mixtures of types; tokenizer_write:
tokenizers.
"""
