"""LoRA and DoRA adapters: initialize, attach, read and write PEFT and GGUF files, combine, merge.

lora_config: `LoraConfig`. targets: which modules it selects, by PEFT's rules or by path rules.
attach: attach an adapter to parameters for training, extract it, or merge it into the weights.
peft_io: PEFT directories; fused_modules: modules that are fused in PEFT's base model and separate
here; gguf: GGUF adapters. multi_lora: multi-LoRA, with an adapter per row of a batch, loaded by
path.

An `Adapter` is separate from the parameters. Attaching it wraps the weights of its target modules
(`weights.types.lora`), and neither copies nor changes the base weights.
"""

from jaxllm.adapters.attach import (
    Adapter,
    attach_adapter,
    attach_new_lora,
    extract_adapter,
    init_adapter,
    make_attacher,
    merge_adapter,
    with_config,
)
from jaxllm.adapters.gguf import read_gguf_adapter, write_gguf_adapter
from jaxllm.adapters.lora_config import LoraConfig
from jaxllm.adapters.multi_lora import with_adapters
from jaxllm.adapters.peft_io import read_adapter, write_adapter
from jaxllm.weights.types.lora import BASE, LoraWeight, adapter_index, choose_adapters

__all__ = [
    "BASE",
    "Adapter",
    "LoraConfig",
    "LoraWeight",
    "adapter_index",
    "attach_adapter",
    "attach_new_lora",
    "choose_adapters",
    "extract_adapter",
    "init_adapter",
    "make_attacher",
    "merge_adapter",
    "read_adapter",
    "read_gguf_adapter",
    "with_adapters",
    "with_config",
    "write_adapter",
    "write_gguf_adapter",
]
