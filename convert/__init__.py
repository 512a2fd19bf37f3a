"""Hugging Face checkpoints to jaxllm's own form and back: an engine, and a table an architecture.

`python -m convert SRC DST` writes the native form, `--to-hf` a Hugging Face directory.

engine: runs a table; tables: what one may say; layouts: matrices that are one there and several
here; experts: stacks of them; decoders: what most tables share. llama, gpt2, qwen2, qwen3, gemma2,
gemma3_text, phi3, olmo2, smollm3, granite, mixtral, qwen3_moe: the tables. What GPTQ and AWQ have
quantized: scheme says how, codes takes their words apart, quantized makes leaves of them.
"""
