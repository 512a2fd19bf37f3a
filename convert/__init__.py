"""Hugging Face checkpoints to jaxllm's own form and back: an engine, and a table an architecture.

`python -m convert SRC DST` writes the native form, `--to-hf` a Hugging Face directory.

engine: runs a table; tables: what one may say; layouts: matrices that are one there and several
here; experts: stacks of them; decoders: what most tables share; flaxfiles: weights of transformers
4's Flax classes. The tables: gpt2, gpt_neox, llama, gemma2, gemma3_text, granite, mixtral, olmo2,
phi3, qwen2, qwen3, qwen3_moe, smollm3. What GPTQ and AWQ have quantized: scheme says how, codes
packs and unpacks their words, quantized makes leaves of them; compressed: the same of
compressed-tensors; quantized_export: integers written in these forms. gguf: the files of llama.cpp,
both ways.
"""
