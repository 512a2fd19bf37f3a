"""Recall for each policy, text length and depth of the fact, as a table, JSON and heat maps."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config.model import ModelConfig
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.files.plots import save_figure
from jaxllm.generation.loops.overflow import OverflowPolicy, SinksAndWindow, find_policy
from jaxllm.generation.option_table import overflow_names
from jaxllm.research.needle.haystack import Encode, Probe, make_probe
from jaxllm.research.needle.prefill import occupied_slots, prefill_texts, score_answers
from jaxllm.research.self_extend import SelfExtend
from jaxllm.runtime.progress import steps_bar
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params

# Overflow policies by name; None means a slot for every token. Names are those of
# `generate --overflow`, and three more.
POLICIES: dict[str, OverflowPolicy | None] = {
    "full": None,
    **{name: find_policy(name) for name in overflow_names() if name != "refuse"},
    "window": SinksAndWindow(sinks=0),
    "self-extend": None,
}
ANSWER_TOKENS = 16  # tokens reserved for an answer
SELF_EXTEND = "self-extend"  # another model with the same parameters


@dataclasses.dataclass(frozen=True)
class Cell:
    """Results for texts of one length with the fact at one depth, under one policy.

    tokens: length of the longest text. tries: number of texts. right: number of texts whose right
    answer was the most likely of `choices`. greedy: number that greedy decoding answers correctly.
    logprob: mean log-probability of the right answer, natural logarithm.
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
        """The share of texts whose right answer was the most likely."""
        return self.right / self.tries


def select_policies(names: Sequence[str]) -> dict[str, OverflowPolicy | None]:
    """Return policies by name. Raises ConfigError for an unknown name, or no names."""
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise ConfigError(
            f"unknown policy: got {', '.join(unknown) or 'none'}, expected {', '.join(POLICIES)}"
        )
    return {name: POLICIES[name] for name in names}


def default_extension(config: ModelConfig, longest: int) -> SelfExtend:
    """Return Self-Extend for texts of `longest` tokens.

    The neighbor window is an eighth of the context; the group size is 4, or more if needed to reach
    the whole text and an answer.
    """
    context = config.max_position_embeddings
    window = max(1, context // 8)
    group = max(4, -(-(longest + ANSWER_TOKENS - window) // max(1, context - window)))
    return SelfExtend(group_size=group, neighbor_window=window)


def recall(
    model: Model,
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
    extended_model: Model | None = None,
    show_progress: bool | None = None,
) -> list[Cell]:
    """Measure recall: one cell for each policy, length and depth, in this order.

    Args:
        encode: Returns a text's token ids, including begin-of-text.
        style: A name in `haystack.STYLES`.
        lengths: Text lengths in tokens.
        depths: Positions of the fact, from 0 (start) to 1 (end).
        slots: Cache size under every policy but "full" and "self-extend".
        tries: Texts per cell, from consecutive seeds starting at `seed * tries`. All policies get
            the same texts; between depths only the place of the fact differs.
        extended_model: The model with Self-Extend, for the policy of that name.

    Raises:
        ConfigError: Before the model runs, for invalid arguments, and for a policy that the model
            does not support.
        CapacityError: Before the model runs, for texts that do not fit.
    """
    chosen = select_policies(policies)
    if tries < 1 or not lengths or not depths:
        raise ConfigError("recall needs at least one length, one depth and one try")
    if SELF_EXTEND in chosen and extended_model is None:
        raise ConfigError("policy self-extend needs extended_model, the model with Self-Extend")
    if SELF_EXTEND in chosen and extended_model is not None:
        reach = extended_model.config.context_length
        if max(lengths) > reach:
            raise CapacityError(
                f"text length exceeds the reach of Self-Extend: got {max(lengths)} tokens, expected"
                f" at most {reach}. Use larger groups (--self-extend G,W)"
            )
    for name, policy in chosen.items():
        _check_policy(model, name, policy)
        if policy is not None:
            occupied_slots(model, policy, slots)
    numbers = range(seed * tries, (seed + 1) * tries)
    texts = {
        (n, d): [make_probe(encode, style, length=n, depth=d, seed=s) for s in numbers]
        for n in lengths
        for d in depths
    }
    cells = []
    with steps_bar("recall", len(chosen) * len(texts), show_progress) as done:
        for name, policy in chosen.items():
            read_by = (
                extended_model if name == SELF_EXTEND and extended_model is not None else model
            )
            for (length, depth), probes in texts.items():
                cells.append(_run_cell(read_by, params, probes, name, policy, slots, length, depth))
                done()
    return cells


def _run_cell(
    model: Model,
    params: Params,
    probes: Sequence[Probe],
    name: str,
    policy: OverflowPolicy | None,
    slots: int,
    length: int,
    depth: float,
) -> Cell:
    room = max(len(ids) for p in probes for ids in p.answers)
    rows, answers = [p.tokens for p in probes], [p.answers for p in probes]
    prefilled = prefill_texts(model, params, rows, policy=policy, slots=slots, answer_tokens=room)
    scored = score_answers(model, params, prefilled, answers, policy=policy, answer_tokens=room)
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


def _check_policy(model: Model, name: str, policy: OverflowPolicy | None) -> None:
    if policy is None or not policy.moves_tokens:
        return
    config = model.config
    if any(config.attention_kind(layer) for layer in range(config.num_hidden_layers)):
        raise ConfigError(
            f"policy {name} changes positions, which this model's long attention does not support:"
            " use full, slide, or segments if the model has a memory"
        )
    if config.learns_positions or config.rope_depends_on_length:
        what = (
            "learned positions"
            if config.learns_positions
            else "rotary angles that depend on the text length"
        )
        raise ConfigError(
            f"policy {name} must move keys, but {config.model_type} has {what}:"
            " use full or slide, which work for every model"
        )


def table(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a table's lines: for each policy, a row per depth and a column per length.

    An entry is two percentages of texts. In the first the right answer is the likeliest; after the
    slash, greedy decoding generates it.
    """
    for policy, group in group_by_policy(cells).items():
        lengths = list(dict.fromkeys(cell.length for cell in group))
        yield f"{policy:14}" + "".join(f"{length:>11,}" for length in lengths)
        for depth in dict.fromkeys(cell.depth for cell in group):
            row = [cell for cell in group if cell.depth == depth]
            shown = "".join(f"{_percent(c.right, c):>6} /{_percent(c.greedy, c):>3}" for c in row)
            yield f"  depth {depth:<6.2f}{shown}"


def to_records(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the cells as JSON-able dicts, with shares and the chance level."""
    return [
        {
            **cell.__dict__,
            "share": cell.share,
            "greedy_share": cell.greedy / cell.tries,
            "chance": 1 / cell.choices,
        }
        for cell in cells
    ]


def plot(
    maps: Mapping[str, Sequence[Cell]], path: Path, title: str, *, columns: int = 3, dpi: int = 150
) -> None:
    """Write a PNG file of heat maps, each titled with its name, over lengths and depths.

    maps: cells by name, of one policy (see `group_by_policy`) or model each; missing cells stay
        empty.
    columns: maximum number of maps in a row. Raises CheckpointError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    cells = [cell for group in maps.values() for cell in group]
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({cell.depth for cell in cells})
    columns = min(columns, len(maps))
    down = math.ceil(len(maps) / columns)
    figure = Figure(figsize=(1 + 3.6 * columns, 0.8 + 2.6 * down), layout="constrained")
    all_axes = figure.subplots(down, columns, squeeze=False)
    image = None
    for axes, (name, group) in zip(all_axes.flat, maps.items(), strict=False):
        share = {(c.depth, c.length): c.share for c in group}
        map_DL = np.array([[share.get((d, n), np.nan) for n in lengths] for d in depths])
        image = axes.imshow(map_DL, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for (row, column), value in np.ndenumerate(map_DL):
            label = "" if np.isnan(value) else f"{value:.0%}"
            ink = "black" if value > 0.5 else "white"  # the color map gets lighter
            axes.text(column, row, label, ha="center", va="center", fontsize=8, color=ink)
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths], fontsize=7)
        axes.set_title(name, fontsize=9)
    for axes in all_axes.flat[len(maps) :]:
        axes.axis("off")
    figure.supxlabel("text length in tokens", fontsize=8)
    figure.supylabel("depth of the fact", fontsize=8)
    chance = max(1 / cell.choices for cell in cells)
    figure.suptitle(f"{title}; chance: {chance:.0%}", fontsize=10)
    if image is not None:
        figure.colorbar(image, ax=all_axes, label="share of right answers", shrink=0.8)
    save_figure(figure, path, dpi=dpi)


def group_by_policy(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Group the cells by policy, in order."""
    names = dict.fromkeys(cell.policy for cell in cells)
    return {name: [cell for cell in cells if cell.policy == name] for name in names}


def _percent(count: int, cell: Cell) -> str:
    return f"{100 * count / cell.tries:.0f}"
