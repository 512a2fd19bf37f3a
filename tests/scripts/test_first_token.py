"""The stopwatch around `jaxllm generate`, on a demo model: it runs, and its columns add up."""

import first_token
import pytest

from jaxllm.located import DEMOS
from jaxllm.text.tokenizer import Tokenizer


def test_every_tenth_is_somebodys(capsys: pytest.CaptureFixture[str]) -> None:
    first_token.main(["-m", str(DEMOS / "llama"), "--repetitions", "1"])
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.split("\n")]
    named = {row[0]: row[1:] for row in rows if len(row) == 3}
    assert named["s (processor s)"] == ["llama, kept programs", "llama, none"]

    def seconds(name: str) -> list[float]:
        return [float(cell.partition(" ")[0]) for cell in named.get(name, ["0", "0"])]

    stages = [n for n in named if n[0].isalpha() and not n.startswith(("s (", "second", "other"))]
    for column, whole in enumerate(seconds("**first token**")):
        parts = sum(seconds(name)[column] for name in stages)
        assert abs(parts - whole) < 0.2 + 0.1 * whole, "what took less than a hundredth is left out"
    for name in ("import jax", "import jaxllm"):  # a prompt may take less than a hundredth
        assert min(seconds(name)) > 0
    for name in ("tracing", "lowering", "compiling"):
        assert seconds(name)[0] < seconds(name)[1], "with kept programs there is nothing to make"
    assert min(seconds("**second token**")) > min(seconds("**first token**"))


def test_a_prompt_has_the_tokens_asked_for() -> None:
    tokenizer = Tokenizer.from_directory(DEMOS / "llama")
    for tokens in (8, 32):
        text = first_token.prompt_of(str(DEMOS / "llama"), tokens)
        assert tokens - 2 < len(tokenizer.encode(text, bos=tokenizer.adds_bos)) <= tokens
