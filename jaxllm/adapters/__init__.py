"""LoRA and DoRA adapters: initialize, attach, read and write PEFT and GGUF files, combine, merge.

config: `LoraConfig`. targets: which modules it selects, by PEFT's rules or by path rules. attach:
attach an adapter to parameters for training, and extract it again. settings: PEFT's
adapter_config.json; every field is read or rejected. files: PEFT directories; fused: modules that
are fused in PEFT's base model and separate here; gguf: GGUF adapters. several: multi-LoRA, with an
adapter per row of a batch. load: adapters by path. merge: merge an adapter into the weights.

An `Adapter` is separate from the parameters. Attaching it wraps the weights of its target modules
(`weights.leaves.adapted`), and neither copies nor changes the base weights.
"""

from jaxllm.adapters.attach import Adapter, around, attach, attached, fresh, taken, with_config
from jaxllm.adapters.config import LoraConfig
from jaxllm.adapters.files import read_adapter, write_adapter
from jaxllm.adapters.gguf import read_gguf_adapter, write_gguf_adapter
from jaxllm.adapters.merge import merged
from jaxllm.adapters.several import BASE, number_of, with_adapters
from jaxllm.weights.leaves.adapted import Adapted, choose

__all__ = [
    "BASE",
    "Adapted",
    "Adapter",
    "LoraConfig",
    "around",
    "attach",
    "attached",
    "choose",
    "fresh",
    "merged",
    "number_of",
    "read_adapter",
    "read_gguf_adapter",
    "taken",
    "with_adapters",
    "with_config",
    "write_adapter",
    "write_gguf_adapter",
]
