"""Hugging Face checkpoints to jaxllm's own form and back: an engine, and a table an architecture.

`python -m convert SRC DST` writes the native form, `--to-hf` a Hugging Face directory.

engine: runs a table; tables: what one may say. llama, gpt2: the tables. What GPTQ and AWQ have
quantized: scheme says how, codes takes their words apart, quantized makes leaves of them. gguf: the
files of llama.cpp, both ways.
"""
