"""ERNIE 4.5 (Baidu 2025), the dense models: Llama whose files rotate pairs of dimensions."""

import dataclasses
from typing import ClassVar

from jaxllm.models.decoder import decoder_family
from jaxllm.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ernie45Config(DecoderConfig):
    """ERNIE 4.5. use_bias: whether all linears have biases."""

    model_type: ClassVar[str] = "ernie4_5"

    use_bias: bool = False

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return (self.use_bias,) * 3


FAMILY = decoder_family(Ernie45Config)
