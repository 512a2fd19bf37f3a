"""The moving picture of README: a terminal in which a model writes, is branched and looked into.

The script runs what the picture shows. One decision: an SVG with CSS animation, which needs no
player and stays sharp, and whose text a test compares.

    python -m scripts.tools.terminal_picture docs/terminal.svg
"""

import argparse
import contextlib
import io
from html import escape
from pathlib import Path
from typing import Any

from jaxllm.cli import main

COMMAND = ("generate", "demo:llama", "Once upon a time", "-n", "30", "--temperature", "0.8")
STEPS = (
    "import jax.numpy as jnp, jaxllm",
    'lm = jaxllm.load("demo:llama")',
    "model, params, cache = lm.model, lm.params, lm.init_cache(batch=1, capacity=64)",
    'ids = [lm.encode("Once upon a time there was a")]',
    "logits, cache = jaxllm.prefill(model, params, cache, ids)",
    "best = jnp.argsort(-logits[0])[:3].tolist()",
    "branches = [jaxllm.decode_step(model, params, cache, [token]).cache for token in best]",
    'print(*(branch.show(lm.tokenizer) for branch in branches), sep="\\n")',
    "jaxllm.cache.rewind(branches[0], 1) == cache  # a step changes no cache",
    'out = jaxllm.forward(model, params, cache, [best[:1]], read=["blocks.2.attn.pattern"])',
    'seen = out.sites["blocks.2.attn.pattern"][0, 1, 0]  # by head 1 of layer 2',
    'print(*(lm.decode([i]) + "▁▂▃▄▅▆▇█"[int(w * 20)] for i, w in zip(ids[0][1:], seen[1:])))',
)
SECONDS, STILL = 0.9, 5  # until the next line; at the end
WIDTH, HEIGHT, COLUMNS = 820, 21, 96  # of the picture and of a line, in pixels; of the text
STYLE = """text { font: 13.5px ui-monospace, Menlo, Consolas, monospace; }
text { fill: #d6deeb; white-space: pre; }
.typed { fill: #7fdbca; }
@media (prefers-reduced-motion: reduce) { text { animation: none !important; } }"""


def make_lines() -> list[str]:
    """Run what is shown; return the lines of the terminal."""
    words = [f'"{word}"' if " " in word else word for word in COMMAND]
    lines = [f"$ jaxllm {' '.join(words)} --seed 1", *_run(lambda: main([*COMMAND, "--seed", "1"]))]
    names: dict[str, Any] = {}
    lines += ["$ python"]
    for step in STEPS:
        code = compile(step, "terminal", "single")
        lines += [f">>> {step}", *_run(lambda code=code: exec(code, names))]
    return lines


def _run(call: Any) -> list[str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        call()
    text = printed.getvalue().strip()
    return [x[i : i + COLUMNS] for x in text.splitlines() for i in range(0, len(x), COLUMNS)]


def draw(lines: list[str]) -> str:
    """Return the SVG, in which one line after another appears."""
    whole = SECONDS * len(lines) + STILL
    height = HEIGHT * (len(lines) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(' / '.join(lines[:1] + lines[-1:]))}</title>",
        f"<style>{STYLE}",
    ]
    for i in range(len(lines)):
        begins = 100 * SECONDS * i / whole
        parts.append(f"@keyframes l{i} {{ 0%, {begins:.2f}% {{ opacity: 0 }}")
        parts.append(f"{begins + 0.01:.2f}%, 100% {{ opacity: 1 }} }}")
    parts += ["</style>", f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#10151c"/>']
    for i, line in enumerate(lines):
        typed = ' class="typed"' if line.startswith(("$ ", ">>> ")) else ""
        parts.append(
            f'<text x="16" y="{HEIGHT * (i + 1)}"{typed} style="animation: l{i} {whole:.1f}s'
            f' infinite">{escape(line)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="where to write the SVG")
    parser.parse_args().path.write_text(draw(make_lines()), encoding="utf-8")
