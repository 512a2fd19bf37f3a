"""How likely is a text? Perplexity, and what a change of the model costs.

data: documents in batches, windows: which tokens count. score: log-probabilities, passes: one pass
with a journal. perplexity (positions: of tokens by how far into their window they stand),
divergence, sensitivity, continuations: what comes of them.
"""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:
    from jaxllm.moved import attribute

    def __getattr__(name: str) -> Any:
        return attribute(__name__, "jaxllm.evaluate.likelihood.continuations", name)
