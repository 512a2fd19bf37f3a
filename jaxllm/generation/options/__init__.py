"""Generation options: one table that validates every source of options.

`LM.generate`, `LM.stream`, requests to `LM.serve`, lines of a batch file, command line flags and
generation_config.json are all checked against it before anything is loaded or run. Options have
Hugging Face's names; for common names of other libraries the error suggests ours.

check: checks of values and of whole requests, and the decoder that they select. resolve: a request
over the checkpoint's defaults. The table itself is `generation.option_table`.
"""

from jaxllm.generation.option_table import (
    OPTIONS,
    Call,
    GenerateOptions,
    Option,
    document_options,
)
from jaxllm.generation.options.check import (
    check_options,
    check_values,
    row_options,
    select_decoder,
)

__all__ = [
    "OPTIONS",
    "Call",
    "GenerateOptions",
    "Option",
    "check_options",
    "check_values",
    "document_options",
    "row_options",
    "select_decoder",
]
