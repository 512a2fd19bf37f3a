"""Which edits a cache belongs to."""

from typing import Any

from jaxllm.cache.kv import KVCache, check_usable
from jaxllm.models.site_inputs import check_edits, fingerprint
from jaxllm.weights.model import Model


def assign_edits(model: Model, cache: KVCache, edits: Any = None) -> KVCache:
    """Return the cache declared to be of these edits; None: of none.

    For a cache whose edited tokens were culled, or one whose keys do not depend on the edits that
    follow. No key changes. Raises ConfigError as `forward` does.
    """
    check_usable(cache)
    checked = check_edits(model, edits, cache.batch, 1, None)
    labelled: KVCache = cache.replace(edits_B=fingerprint(checked, cache.batch))
    return labelled
