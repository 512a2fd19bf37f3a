"""Does it compute the same? Two sides, one case, every stage.

compare: the comparison. sides: what can run a case, stages: what it shows. difference: the
measures. reference: transformers as a side. first: a side that one of several processes runs.
report: text, JSON, picture. vectors: one side, frozen.
"""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:
    from jaxllm.moved import attribute

    def __getattr__(name: str) -> Any:
        return attribute(__name__, "jaxllm.evaluate.equivalence.compare", name)
