"""Self-Extend (Jin et al. 2024, arXiv 2401.01325): longer texts without training.

Tokens within a window keep their positions, and those of farther tokens are divided by a group
size. Cached keys are rotated to their own positions. So queries attend in two views: unchanged, and
rotated to their grouped position, against keys rotated to theirs, block by block. Both views share
one softmax. The regrouped keys are never stored.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Any

import jax
from msgspec import Meta

from jaxllm.config.attention_kind import AttentionKind
from jaxllm.config.model import Rope, TokenCount
from jaxllm.errors import ConfigError
from jaxllm.models.decoder_config import DecoderConfig
from jaxllm.models.layers import AttentionContext, Unrotated
from jaxllm.models.sites import WEIGHT_SITES, SiteRecorder
from jaxllm.ops.attention import KeyView, Part, Queries, fold
from jaxllm.ops.kv_quant import dequantize
from jaxllm.ops.rope import rerotate
from jaxllm.runtime.schema import check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfExtend(AttentionKind):
    """Attention with grouped positions for far tokens, in the layers with the main rotary settings.

    Attributes:
        group_size: What the positions of far tokens are divided by.
        neighbor_window: Number of the last tokens, a query's own included, that keep their
            positions.
    """

    kind: str = "self-extend"
    group_size: TokenCount
    neighbor_window: Annotated[int, Meta(ge=0, le=1 << 26)]

    def __post_init__(self) -> None:
        check_fields(self, "Self-Extend: ")
        if self.neighbor_window == 0:
            raise ConfigError(
                "Self-Extend: neighbor_window must be at least 1, got 0: a token would share its"
                " position with earlier tokens of its group"
            )

    @classmethod
    def parse(cls, text: str) -> "SelfExtend":
        """Parse "G,W". Raises ConfigError for any other text."""
        numbers = re.fullmatch(r"\s*(\d{1,9})\s*,\s*(\d{1,9})\s*", text)
        if not numbers:
            raise ConfigError(
                "--self-extend must be GROUP,WINDOW (group size and neighbor window), for example"
                f" 8,512: got {text!r:.40}"
            )
        return cls(group_size=int(numbers[1]), neighbor_window=int(numbers[2]))

    @property
    def runs_trees(self) -> bool:
        return True

    @property
    def period(self) -> int:
        return 1

    def context_length(self, trained: int) -> int:
        window = self.neighbor_window
        return self.group_size * (trained - window + window // self.group_size)

    def complaints(self, config: DecoderConfig) -> list[str]:
        if config.rope_depends_on_length:
            return [
                "Self-Extend moves keys to other positions, which is impossible if angles depend on"
                " the text length"
            ]
        if not any(config.layer_rope(i) == config.rope for i in range(config.num_hidden_layers)):
            return ["Self-Extend requires rotary positions"]
        if self.neighbor_window >= config.max_position_embeddings:
            return [
                f"Self-Extend's neighbor_window {self.neighbor_window} must be less than the"
                f" context of {config.max_position_embeddings} tokens, which it extends"
            ]
        return []

    def attend(
        self,
        context: AttentionContext,
        site: SiteRecorder,
        q_BTNH: jax.Array,
        parts: Sequence[Part],
        unrotated: Unrotated | None,
        *,
        rope: Rope | None,
        window: int | None,
        sink_N: jax.Array | None,
        scale: float,
        cap: float | None,
    ) -> tuple[jax.Array, jax.Array | None, None]:
        """Return the heads and the attention mass; see `AttentionKind.attend`.

        A query attends to tokens at distances below the window w at their positions p, and to
        farther ones at `p // G`, itself at `position // G + w - w // G` (the paper's algorithm 1).
        Apparent distances never decrease as true ones grow, and those of far tokens are at least w,
        so no distance is shared across the window's edge. G = 1 is full attention.

        Raises ConfigError for a mask, documents, and reads or edits of scores or weights.
        """
        if context.mask_BTS is not None or context.document_BT is not None:
            raise ConfigError(
                "Self-Extend (group_size, neighbor_window) supports no masks, packed documents or"
                " exported graphs. Use the model without it"
            )
        if site.touches(*WEIGHT_SITES):
            raise ConfigError(
                "Self-Extend does not support attention_weights, attn.scores or attn.pattern."
                " Use attention_mass"
            )
        assert rope is not None
        w, G, H, at_BT = (
            self.neighbor_window,
            self.group_size,
            q_BTNH.shape[-1],
            context.position_BT,
        )
        moved_BT = at_BT // G + (w - w // G) - at_BT
        far_BTNH = rerotate(q_BTNH, moved_BT, rope, head_dim=H)
        near, far = (
            Queries.from_heads(q, at_BT, parts, scale=scale, window=within, cap=cap)
            for q, within in (
                (q_BTNH, w if window is None else min(w, window)),
                (far_BTNH, window),
            )
        )

        def group_positions(block: Part, seen_BTS: jax.Array) -> tuple[Part, jax.Array]:
            k_BS = block.position_BS
            far_BTS = seen_BTS & (at_BT[:, :, None] - k_BS[:, None, :] >= w)
            if block.k_BSKH.shape[0] == 1:  # shared: one position in all rows that have it
                k_BS = k_BS.max(axis=0, keepdims=True)
            turned = rerotate(dequantize(block.k_BSKH), k_BS // G - k_BS, rope, head_dim=H)
            return Part(turned, block.v_BSKH, block.position_BS), far_BTS

        views = [KeyView(near), KeyView(far, group_positions)]
        return *fold(views, parts, q_BTNH.dtype, mass=context.mass, sink_N=sink_N), None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
