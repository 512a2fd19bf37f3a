"""`jaxllm lens`: which token the model would name after each layer."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxllm.cli.console import log, write, write_json
from jaxllm.cli.eval_data import read_text_option
from jaxllm.cli.option_groups import AdapterOptions
from jaxllm.cli.options import Model, NewFile, Plot
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from jaxllm.inside import Lens
    from jaxllm.lm import LM

EXAMPLE = """
Examples:

  jaxllm lens demo:llama -p 'Once upon a time' --plot lens.png

  jaxllm lens demo:llama -p 'One day' --fit tuned --text @story.txt --save tuned.safetensors
"""
CELL = 10  # characters of a token in the table
LensKind = Literal["tuned", "jacobian"]


def lens(
    model: Model = "demo:llama",
    prompt: Annotated[str, typer.Option("--prompt", "-p")] = "Once upon a time",
    file: Annotated[Path | None, typer.Option("--lens", metavar="FILE")] = None,
    fit: LensKind | None = None,
    text: Annotated[str | None, typer.Option(metavar="TEXT|@FILE|-")] = None,
    window: Annotated[int, typer.Option(min=2)] = 64,
    steps: Annotated[int, typer.Option(min=1)] = 200,
    save: NewFile = None,
    top: Annotated[int, typer.Option(min=1)] = 1,
    plot: Plot = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    *,
    loading: AdapterOptions,
) -> None:
    """Print the token that the model would name next if it ended after each layer.

    It is the logit lens, unless you give the file of a lens, or fit one to a text: a tuned lens
    (trained affine maps) or a Jacobian lens (the mean effect of a layer on the last one).

    Args:
        prompt: Text to read.
        file: Lens to use, a file that --save wrote [default: the logit lens].
        fit: Lens to fit first.
        text: Text to fit it to.
        window: Tokens per piece of that text.
        steps: Optimizer steps of a tuned lens.
        save: File for the fitted lens, safetensors.
        top: Number of tokens to show of each layer and position.
        plot: PNG file for a picture of the likeliest tokens.
        as_json: Print one JSON object.
    """
    if (fit is None) != (text is None) or (save is not None and fit is None):
        raise ConfigError("--fit requires --text, and --text and --save require --fit")
    if fit is not None and file is not None:
        raise ConfigError("give --lens or --fit, not both")
    if save is not None:
        from jaxllm.convert.gguf.writer import check_absent

        check_absent(save)
    corpus = None if text is None else read_text_option(text)
    lm = loading.load(model)
    import numpy as np

    from jaxllm import inside

    chosen = None if file is None else inside.read_lens(file, lm.config)
    if fit is not None and corpus is not None:
        chosen = _fit_lens(lm, fit, corpus, window, steps)
        if save is not None:
            inside.write_lens(save, chosen)
            log(f"wrote {save}")
    ids = lm.encode(prompt)
    token_LTK, logprob_LTK = (
        x[:, 0] for x in inside.top_tokens(lm.model, lm.params, np.array([ids]), chosen, count=top)
    )
    pieces = [_show(lm, token) for token in ids]
    guesses = [[[_show(lm, int(t)) for t in best] for best in row] for row in token_LTK]
    prob_LTK = np.exp(logprob_LTK)
    if as_json:
        layers = [
            [[[*pair] for pair in zip(*best, strict=True)] for best in zip(*row, strict=True)]
            for row in zip(guesses, np.round(prob_LTK.astype(float), 6).tolist(), strict=True)
        ]
        write_json({"tokens": pieces, "layers": layers})
    else:
        _write_table(pieces, guesses)
    if plot is not None:
        _plot_lens(pieces, [[best[0] for best in row] for row in guesses], prob_LTK[..., 0], plot)
        log(f"wrote {plot}")


def _fit_lens(lm: "LM", kind: LensKind, text: str, window: int, steps: int) -> "Lens":
    """Return a lens that is fitted to pieces of a text, and log how close it is to the model."""
    from jaxllm import inside

    ids, window = lm.encode(text), min(window, lm.config.context_length)
    texts = [ids[i : i + window] for i in range(0, len(ids), window)]
    args = (lm.model, lm.params, texts)
    if kind == "tuned":
        fitted = inside.fit_tuned_lens(*args, steps=steps, log=log)
    else:
        fitted = inside.fit_jacobian_lens(*args)
    for name, one in (("logit", None), (kind, fitted)):
        divergence = " ".join(f"{x:.3f}" for x in inside.lens_divergence(*args, one))
        log(f"divergence of the {name} lens from the model on this text, in nats: {divergence}")
    return fitted


def _write_table(pieces: list[str], guesses: list[list[list[str]]]) -> None:
    """Write one line per token: its text, and what each layer would name next."""
    lines = [["token", *(f"layer {layer}" for layer in range(len(guesses)))]]
    for number, piece in enumerate(pieces):
        for rank in range(len(guesses[0][0])):
            lines += [["" if rank else piece, *(row[number][rank] for row in guesses)]]
    for cells in lines:
        write(" ".join(f"{cell[:CELL]:<{CELL}}" for cell in cells).rstrip() + "\n")


def _show(lm: "LM", token: int) -> str:
    """Return a token's text with escapes for line breaks; its id without a tokenizer."""
    if lm.tokenizer is None:
        return str(token)
    return repr(lm.tokenizer.decode([token]) or lm.tokenizer.token(token))[1:-1]


def _plot_lens(
    pieces: list[str], guesses: list[list[str]], prob_LT: "np.ndarray", path: Path
) -> None:
    """Write a picture of the likeliest token after each layer (rows) of each token (columns); the
    color is its probability.
    """
    from matplotlib.figure import Figure

    from jaxllm.files.plots import save_figure

    L, T = prob_LT.shape
    figure = Figure(figsize=(1.6 + 0.85 * T, 1.2 + 0.36 * L), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(prob_LT, aspect="auto", origin="lower", cmap="Blues", vmin=0, vmax=1)
    for layer, row in enumerate(guesses):
        for column, guess in enumerate(row):
            color = "white" if prob_LT[layer, column] > 0.6 else "black"
            axes.text(
                column, layer, guess[:11], ha="center", va="center", color=color, fontsize=8,
                parse_math=False,
            )  # fmt: skip
    axes.set_xticks(range(T), pieces, rotation=35, ha="right", fontsize=8)
    for label in axes.get_xticklabels():
        label.set_parse_math(False)
    axes.set_yticks(range(L))
    axes.set(ylabel="after layer", xlabel="token")
    figure.colorbar(image, label="probability")
    save_figure(figure, path)
