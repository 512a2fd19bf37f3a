"""The choice of a token.

sampler: chains of small pytrees, and the draw. truncation: processors of the scores alone;
penalties, constraints: of the text; each file ends with the options that users set them by.
readers: of what users write for these. options: all of them, and the sampler that they make.
spellings: what other libraries call an option.
"""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:
    from jaxllm.moved import attribute

    def __getattr__(name: str) -> Any:
        return attribute(__name__, "jaxllm.decode.sampling.sampler", name)
