"""The public names of adapters; `__init__.py` imports them lazily."""

from .attach import (
    Adapter as Adapter,
    attach_adapter as attach_adapter,
    attach_new_lora as attach_new_lora,
    extract_adapter as extract_adapter,
    init_adapter as init_adapter,
    make_attacher as make_attacher,
    merge_adapter as merge_adapter,
    with_config as with_config,
)
from .gguf import read_gguf_adapter as read_gguf_adapter, write_gguf_adapter as write_gguf_adapter
from .lora_config import LoraConfig as LoraConfig
from .multi_lora import (
    BASE as BASE,
    LoraWeight as LoraWeight,
    choose_adapters as choose_adapters,
    with_adapters as with_adapters,
)
from .peft_io import read_adapter as read_adapter, write_adapter as write_adapter
