"""What is to be known of a family of models, beside the models themselves."""

import dataclasses
from typing import NamedTuple

import flax.linen as nn

from jaxllm.config import ModelConfig


class Site(NamedTuple):
    """Linears of a layer that multiply one input.

    input: its name in `layers.Layer`. output: likewise, what the layer's part that they are in adds
    to the stream. source: the module that makes the input, up to a product by element: a scale of
    the input's channels can be taken out of it. A norm, or a linear whose last rows these are.
    """

    input: str
    linears: tuple[str, ...]
    output: str
    source: str | None


class Member(NamedTuple):
    """A linear of a layer of which each head, or each channel, has a share of its own.

    axis: 0 where that is rows, what it puts out, with the bias; 1 where it is columns. runs: how
    many runs of all shares stand one after the other in it. grouped: whether it has shares of
    key/value heads alone, none of query heads.
    """

    linear: str
    axis: int
    runs: int = 1
    grouped: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What is to be known of the models of one `model_type`.

    config, module: their classes. aliases: model_types of Hugging Face's that are this one under
    another name. tokens, positions: the paths of the tables of tokens and of learned positions
    (None: there is none). The rest is what stages are called: embeddings, norm, and within the
    layers, whose path is `layers`, the norms before attention and before the MLP (None: there is
    none), attention, the MLP's last linear, and what a layer of experts has in its place, their
    router. block: the class of a layer. sites: its linears, in the order in which it runs them, of
    which a layer may lack some; no experts. heads, channels: what goes together with a key/value
    head and its query heads, or with a number of the MLP's hidden ones. experts: likewise with a
    number of an expert's hidden ones, in families whose channels are not cut, and what their layers
    without experts have. norms: over all heads at once. widths: the fields that say how many hidden
    numbers there are.
    """

    config: type[ModelConfig]
    module: type[nn.Module]
    tokens: str
    positions: str | None
    embeddings: str
    layers: str
    attention_norm: str | None
    attention: str
    mlp_norm: str | None
    mlp_down: str
    norm: str
    block: type[nn.Module]
    sites: tuple[Site, ...]
    heads: tuple[Member, ...]
    channels: tuple[Member, ...]
    experts: tuple[Member, ...] = ()
    norms: tuple[Member, ...] = ()
    widths: tuple[str, ...] = ("intermediate_size",)
    router: str | None = None
    aliases: tuple[str, ...] = ()

    @property
    def tables(self) -> tuple[str, ...]:
        """The paths of all tables of which a token takes one row."""
        return (self.tokens,) if self.positions is None else (self.tokens, self.positions)
