"""The choice of a token.

sampler: chains of small pytrees, and the draw. options: their names, readers: their values.
truncation: processors of the scores alone; penalties, constraints: of the text.
"""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:
    from jaxllm.moved import attribute

    def __getattr__(name: str) -> Any:
        return attribute(__name__, "jaxllm.decode.sampling.sampler", name)
