"""Conversion between Hugging Face checkpoints and jaxllm: one engine, and a table per architecture.

`python -m convert SRC DST` writes the native format, `--to-hf` a Hugging Face directory.

hf: reads and writes checkpoints by a table; tables: the columns of a table; fused_layouts: fused
matrices; experts: stacks of experts; decoders: rows that most tables share; flax_msgpack: weights
of transformers 4's Flax classes. The tables are in files with the names of `jaxllm.models`'
families. Quantized checkpoints: quantization_config reads the settings of GPTQ and AWQ,
gptq_packing packs and unpacks int32 words, gptq_awq and compressed_tensors find a matrix's
integers, int_pieces makes weights of them; quantized_export writes integer weights in these
formats. registry: all checkpoint formats. gguf: llama.cpp's files, both ways.
"""
