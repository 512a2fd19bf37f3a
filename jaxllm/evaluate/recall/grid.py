"""Recall at every depth of texts of every length, under a policy: cells of a heat map."""

import dataclasses
from collections.abc import Sequence

import flax.linen as nn
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.decode.loops.overflow import (
    HeavyHitters,
    Overflow,
    Pooled,
    PooledByUse,
    Segments,
    SinksAndWindow,
)
from jaxllm.decode.loops.overflow import Slide as Begin
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.evaluate.recall.reading import answer, read, taken
from jaxllm.evaluate.recall.texts import Encode, Probe, probe
from jaxllm.progress import steps_bar
from jaxllm.weights.paths import Params

# What a text is read under: what makes room in the cache, None for a slot for every token. Names
# are those of `generate --overflow`, and two more.
POLICIES: dict[str, Overflow | None] = {
    "full": None,
    "slide": Begin(),
    "window": SinksAndWindow(sinks=0),
    "sinks": SinksAndWindow(),
    "heavy": HeavyHitters(),
    "pooled": Pooled(),
    "pooled-by-use": PooledByUse(),
    "segments": Segments(),
    "self-extend": None,
}
ROOM = 16  # tokens that answers may have
EXTENDED = "self-extend"  # which is another model with the same parameters


@dataclasses.dataclass(frozen=True)
class Cell:
    """Texts of one length with the fact at one depth, under one policy.

    tokens: of the longest text. tries: how many texts. right: of them those whose right answer was
    the likeliest of `choices`. greedy: those that greedy decoding answers. logprob: the right
    answer's mean log-probability, natural logarithm.
    """

    policy: str
    length: int
    depth: float
    tokens: int
    tries: int
    choices: int
    right: int
    greedy: int
    logprob: float

    @property
    def share(self) -> float:
        """The share of texts whose right answer was the likeliest."""
        return self.right / self.tries


def policies_named(names: Sequence[str]) -> dict[str, Overflow | None]:
    """The policies of these names. Raises ConfigError for an unknown name, or none."""
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise ConfigError(f"policies are {', '.join(POLICIES)}; got {', '.join(unknown) or 'none'}")
    return {name: POLICIES[name] for name in names}


def default_extension(config: ModelConfig, longest: int) -> dict[str, int]:
    """Numbers of Self-Extend for texts of `longest` tokens: an eighth of the context as neighbours,
    groups of four, or as many as it takes until the text and an answer are within reach.
    """
    context = config.max_position_embeddings
    window = max(1, context // 8)
    group = max(4, -(-(longest + ROOM - window) // max(1, context - window)))
    return {"group_size": group, "neighbor_window": window}


def recall(
    model: nn.Module,
    params: Params,
    encode: Encode,
    *,
    style: str,
    lengths: Sequence[int],
    depths: Sequence[float],
    policies: Sequence[str] = ("full",),
    slots: int = 256,
    tries: int = 8,
    seed: int = 0,
    extended: nn.Module | None = None,
    show_progress: bool | None = None,
) -> list[Cell]:
    """One cell for each policy, length and depth, in this order.

    encode: a text's token ids, begin-of-text and all. style: of `texts.STYLES`. slots: of the cache
    that every policy but "full" has. tries: texts a cell, of the seeds from `seed` times `tries`
    on; the same ones under every policy, and but for the fact's place at every depth. extended:
    the model with Self-Extend, for the policy of that name.

    Raises ConfigError and CapacityError, before the model runs, for what the policies, the texts or
    the model cannot be; ConfigError for keys that cannot be moved, where a policy must move them.
    """
    chosen = policies_named(policies)
    if tries < 1 or not lengths or not depths:
        raise ConfigError("recall needs a length, a depth and a try at least")
    if EXTENDED in chosen and extended is None:
        raise ConfigError("policy self-extend needs the extended model (LM.self_extended)")
    if EXTENDED in chosen and extended is not None:
        reach = extended.config.context_length
        if max(lengths) > reach:
            raise CapacityError(
                f"Self-Extend with these numbers reaches texts of {reach} tokens, not of"
                f" {max(lengths)}: ask for larger groups (--self-extend G,W)"
            )
    for name, policy in chosen.items():
        _check_movable(model, name, policy)
        if policy is not None:
            taken(model, policy, slots)
    numbers = range(seed * tries, (seed + 1) * tries)
    texts = {
        (n, d): [probe(encode, style, length=n, depth=d, seed=s) for s in numbers]
        for n in lengths
        for d in depths
    }
    cells = []
    with steps_bar("recall", len(chosen) * len(texts), show_progress) as done:
        for name, policy in chosen.items():
            read_by = extended if name == EXTENDED and extended is not None else model
            for (length, depth), probes in texts.items():
                cells.append(_cell(read_by, params, probes, name, policy, slots, length, depth))
                done()
    return cells


def _cell(
    model: nn.Module,
    params: Params,
    probes: Sequence[Probe],
    name: str,
    policy: Overflow | None,
    slots: int,
    length: int,
    depth: float,
) -> Cell:
    room = max(len(ids) for p in probes for ids in p.answers)
    rows, answers = [p.tokens for p in probes], [p.answers for p in probes]
    found = read(model, params, rows, policy=policy, slots=slots, room=room)
    scored = answer(model, params, found, answers, policy=policy, room=room)
    right_B = np.array([p.right for p in probes])
    each = np.arange(len(probes))
    return Cell(
        policy=name,
        length=length,
        depth=depth,
        tokens=max(map(len, rows)),
        tries=len(probes),
        choices=len(answers[0]),
        right=int((scored.logprob_BC.argmax(axis=1) == right_B).sum()),
        greedy=int(scored.greedy_BC[each, right_B].sum()),
        logprob=float(scored.logprob_BC[each, right_B].mean()),
    )


def _check_movable(model: nn.Module, name: str, policy: Overflow | None) -> None:
    if policy is None or isinstance(policy, (Begin, Segments)):
        return
    config = model.config
    if any(config.long_attention(layer) for layer in range(config.num_hidden_layers)):
        raise ConfigError(
            f"policy {name}: attention of another kind finds tokens by their positions, which this"
            " policy changes; such models have full, slide and, where they keep a memory, segments"
        )
    if not config.ropes or config.angles_follow_length:
        what = "learned positions" if not config.ropes else "angles that follow the text's length"
        raise ConfigError(
            f"policy {name}: {config.model_type} has {what}, and its keys cannot be moved where the"
            " policy wants them; full and slide are for every model"
        )
