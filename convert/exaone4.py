"""EXAONE 4 checkpoints: the table, and the pattern of sliding layers."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from jaxllm.convert.decoders import LAYER_TYPES, make_table, resolve_layer_types
from jaxllm.convert.tables import Field
from jaxllm.models.exaone4 import Exaone4Config

PATTERN = "sliding_window_pattern"
# Of EXAONE 4.5's layers that predict more than one token.
UNUSED = frozenset({"mtp_loss_scaling_factor", "mtp_share_layers", "num_nextn_predict_layers"})


def _resolve_layers(fields: dict[str, Any], complaints: list[str], data: Mapping[str, Any]) -> None:
    """Derive missing layer types from a period; files with a text such as LLLG have both."""
    pattern = fields.pop(PATTERN)
    if "sliding_window" not in data:  # null is not its default: no layer slides
        fields["sliding_window"] = 4096
    slides = fields["sliding_window"] is not None
    if fields["layer_types"] is None and slides and (isinstance(pattern, str) or pattern < 1):
        complaints.append(f"without layer_types, {PATTERN} must be a number, got {pattern!r:.20}")
        return
    resolve_layer_types(fields, lambda i: slides and (i + 1) % pattern != 0)


TABLES = (
    make_table(
        "Exaone4",
        Exaone4Config,
        LAYER_TYPES,
        Field("num_key_value_heads", "num_key_value_heads", 32),
        Field("rms_norm_eps", "norm_eps", 1e-5),
        Field("sliding_window", "sliding_window", None),
        Field(PATTERN, PATTERN, 4, Annotated[int, Meta(ge=0)] | str),
        ignored_fields=UNUSED,
        derive=_resolve_layers,
    ),
)
