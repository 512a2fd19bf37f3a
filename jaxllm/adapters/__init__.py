"""LoRA and DoRA adapters: made, PEFT's files both ways, several beside each other, merged.

config: what an adapter is asked to be. targets: which modules it is beside, by PEFT's rules or by
ours. attach: parameters with one adapter, to be trained, and the adapter out of them again.
settings: PEFT's adapter_config.json, every field read or refused. files: PEFT's directories; fused:
what is one module there and several here; gguf: GGUF's files. several: parameters with adapters of
which each row of a batch takes one. load: those of directories and files. merge: into the weights.

An `Adapter` is a value beside the parameters. What it does in a product, its leaf says
(`weights.leaves.adapted`); the base's leaves stay the objects that they are.
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
