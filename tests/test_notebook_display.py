"""What a notebook shows: models and caches as tables, errors in lines, options by Tab."""

import html.parser
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import jaxllm
from jaxllm.cache import fork
from jaxllm.generation.options import OPTIONS
from jaxllm.weights.render import render_params, render_table


class Cells(html.parser.HTMLParser):
    """The rows of a table as lists of text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def demo() -> jaxllm.LM:
    return jaxllm.load("demo:llama", quantize="int8")


def test_model_table_counts_every_array_once(demo: jaxllm.LM) -> None:
    """Rows of the table group the layers, name format and shape, and add up to all bytes."""
    rows = Cells(demo._repr_html_()).rows[1:]
    sizes = [int(row[-1].replace(",", "")) for row in rows]
    leaves = jax.tree.leaves(demo.params)
    assert sizes[-1] == sum(sizes[:-1]) == sum(x.nbytes for x in leaves)
    layers = demo.config.num_hidden_layers
    kind = ["layers.*.mlp.up_proj.weight", str(layers), "384 x 128", "int8"]
    assert kind in [row[:4] for row in rows]


def test_tables_escape_all_text() -> None:
    """A name of a weight or a directory cannot add HTML."""
    page = render_params("<b>&", {"<script>": np.zeros((2, 3), np.float32)})
    assert "<script>" not in page and "<b>" not in page
    assert Cells(page).rows[1] == ["<script>", "1", "2 x 3", "float32", "24"]
    assert "<i>" not in render_table("", ("<i>",), [])


def test_cache_table_shows_segments_of_forks(demo: jaxllm.LM) -> None:
    """A fork's rows share a frozen segment, which counts once; a traced cache is one line."""
    cache = demo.init_cache(1, capacity=16)
    _, cache = jaxllm.prefill(demo.model, demo.params, cache, [[1, 2, 3]])
    cache = fork(cache, 3, capacity=8)
    rows = Cells(cache._repr_html_()).rows[1:]
    assert rows[0][:2] == ["frozen", "1 (one for 3)"] and rows[0][3] == "3"
    assert rows[1][:4] == ["tail", "3", "8", "0, 0, 0"]
    assert rows[-1][-1] == f"{cache.nbytes:,}"
    pages = []
    jax.eval_shape(lambda c: pages.append(c._repr_html_()), cache)
    assert "traced" in pages[0] and "<table" not in pages[0]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def test_errors_show_message_and_line_of_cell(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """IPython shows the message, the line of the cell, and how to see the traceback."""
    shell.run_cell("import jaxllm\n\njaxllm.load('demo:none')")
    shown = capsys.readouterr().out
    assert re.search(r"CheckpointError: no demo 'demo:none': expected one of .*demo:llama", shown)
    assert "line 3 of the cell: jaxllm.load('demo:none')" in shown
    assert len(shown.strip().splitlines()) == 3
    shell.run_cell(shown.splitlines()[-1].removeprefix("  Its traceback: "))
    assert "resolve.py" in capsys.readouterr().err


def test_options_complete_by_tab(shell: Any, demo: jaxllm.LM) -> None:
    """IPython completes every option of generate and stream."""
    shell.push({"lm": demo})
    for method in ("generate", "stream"):
        code = f"lm.{method}('x', "
        with provisionalcompleter():
            found = {c.text for c in shell.Completer.completions(code, len(code))}
        assert {f"{name}=" for name in OPTIONS} <= found
