"""LoRA and DoRA adapters: initialize, attach, read and write PEFT and GGUF files, combine, merge.

lora_config: `LoraConfig`. targets: which modules it selects, by PEFT's rules or by path rules.
attach: attach an adapter to parameters for training, extract it, or merge it into the weights.
peft_io: PEFT directories; fused_modules: modules that are fused in PEFT's base model and separate
here; gguf: GGUF adapters. multi_lora: multi-LoRA, with an adapter per row of a batch, loaded by
path.

An `Adapter` is separate from the parameters. Attaching it wraps the weights of its target modules
(`weights.types.lora`), and neither copies nor changes the base weights.

Public names are in `__init__.pyi`, each imported when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
