"""Arguments of every command: MODEL, prompts and options, and errors with remedies."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from msgspec import Meta

import jaxllm
from jaxllm.cli.fields import Flags, add_command
from jaxllm.convert import registry
from jaxllm.errors import SamplingError
from tests.conftest import ROOT, Run, assert_refused, succeed
from tests.tiny_models import save_random


@dataclasses.dataclass
class Settings:
    """Settings.

    Attributes:
        size: How large.
        kind: Of which kind.
    """

    size: Annotated[int, Meta(ge=2)] = 3
    kind: Literal["a", "b"] = "a"
    rate: Annotated[float, Meta(le=1, description="How fast.")] | None = None
    deep: bool = False


def test_flags_come_from_annotations(capsys: pytest.CaptureFixture[str]) -> None:
    """Names, bounds, choices, defaults and help of a dataclass are those of the flags; a group has
    only the chosen fields, by other names if given.
    """
    found: list[Any] = []

    def some(more: Annotated[dict[str, Any], Flags(Settings, "rate", deep="--deeply -d")]) -> None:
        """Do it.

        Args:
            more: Not a flag.
        """
        found.append(more)

    def all_of(settings: Settings) -> None:
        found.append(settings)

    def call(function: Callable[..., None], *words: str) -> None:
        app = typer.Typer(rich_markup_mode=None)
        add_command(app, function, "Example: x", lambda values: None)
        app(words, standalone_mode=False)

    call(all_of, "--size", "5", "--kind", "b", "--deep")
    call(some, "-d", "--rate", "0.5")
    assert found == [Settings(5, "b", None, True), {"rate": 0.5, "deep": True}]
    for function, *words in (
        (all_of, "--size", "1"),
        (all_of, "--kind", "c"),
        (some, "--size", "5"),
    ):
        with pytest.raises(typer.TyperException):
            call(function, *words)
    call(all_of, "--help")
    shown = capsys.readouterr().out
    assert re.search(r"--size <int range> +How large\. +\[default: 3; x>=2\]", shown)
    assert "--kind <a|b>" in shown and "How fast." in shown and "--no-deep" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "demo:llama", "x"], "unexpected extra argument(s) (x)"),
        (["info", "-m", "demo:llama"], "No such option: -m: give MODEL without it"),
        (["generate", "Once upon a time"], "Give a prompt after the model, or with -p"),
        (["generate", ""], "the checkpoint path is empty"),
        (["convert", "demo:llama", "x.gguf"], "give --to-gguf TYPE"),
        (["convert", "demo:llama", "nowhere/x"], "no such folder: nowhere"),
        (["quantize", "demo:llama", "nowhere/x/y"], "no such folder: nowhere/x"),
        (["generate", "--adapter", "nowhere"], "--adapter: nowhere does not exist"),
        (["merge", "demo:llama", "out", "--adapter", "nowhere"], "nowhere does not exist"),
        (["generate", "demo:llama", "One", "-p", "One"], "more than one prompt"),
        (["train", "lora", "nowhere", "out", "--data", "x"], "nowhere is not a directory"),
        (["generate", "--num-beams", "3"], "--num-beams: use -o num_beams=VALUE"),
        (["generate", "--repeat-penalty", "1.1"], "repetition"),
        (["generate", "--max-tokens", "5"], "--max-new-tokens"),
        (["generate", "--promt", "x"], "--prompt"),
        (["generate", "-n", "x"], "--max-new-tokens must be a whole number, got 'x'"),
        (["convert"], "Missing argument 'MODEL'"),
        (["nonsense"], "No such command 'nonsense'"),
        (["generate", "--temperature", "hot"], "--temperature must be a number, got 'hot'"),
        (["upcycle", "demo:llama", "chat", "--experts", "0"], "--experts must be 1 or more"),
        (["generate", "nowhere"], "nowhere is not a directory"),
        (["generate", "owner/name"], "write hf:owner/name"),
        (["generate", "demo:bert"], "expected one of demo:gpt2, demo:llama"),
        (["generate", "-n", "0"], "max_new_tokens"),
        (["generate", "-n", "100000"], "exceed the model's context"),
        (["generate", "--temperature", "-1"], "temperature must be"),
        (["generate", "--top-p", "2"], "top_p must be"),
        (["generate", "--seed", "-1"], "seed must be"),
        (["generate", "--dtype", "int3"], "must be one of"),
        (["info", "/dev/null"], "is not a checkpoint directory or file"),
        (["convert", "nowhere", "elsewhere"], "nowhere is not a directory"),
        (["bench", "--json", "--csv"], "--json and --csv cannot be combined"),
        (["bench", "-r", "0"], "--repetitions must be 1 or more"),
        (["bench", "--prompts", "x"], "numbers separated by commas"),
        (["bench", "--decode", "0"], "bench: decode must be at least 1"),
    ],
)
def test_refusals_name_remedy(run: Run, arguments: list[str], message: str) -> None:
    assert_refused(run, message, *arguments)


TEXT = ("--text", "abc")
CHOICES = [
    (("generate", "demo:llama", "x"), ("overflow", "cache-dtype", "dtype", "quantize", "mesh")),
    (("perplexity", "demo:llama", *TEXT), ("protocol", "bos", "other-dtype", "other-quantize")),
    (("recall", "demo:llama"), ("policies",)),
    (("sensitivity", "demo:llama", *TEXT), ("format", "by")),
    (("export", "demo:llama", "out"), ("what", "form")),
    (("plan", "demo:llama"), ("hardware", "goal")),
    (("convert", "demo:llama", "out"), ("to-gguf", "dtype")),
    (("quantize", "demo:llama", "out"), ("format",)),
    (("infini", "demo:llama", "out"), ("update",)),
    (("train", "full", "demo:llama", "out", "--data", "data.jsonl"), ("schedule",)),
    (("train", "qat", "demo:llama", "out", "--data", "data.jsonl"), ("format",)),
]


def test_choices_are_checked_before_a_model_opens(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option's value that is none of its choices is refused before any checkpoint is opened."""
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"text": "One day"}\n')
    monkeypatch.setattr(registry, "CHECKPOINT_FORMATS", ())  # nothing opens
    for command, options in CHOICES:
        for option in options:
            status, out, err = run(*command, f"--{option}", "no-such")
            assert (status in (1, 2), out) == (True, ""), (command, option)
            assert "no-such" in err and "not a checkpoint" not in err, (command, option, err)


def test_option_values_in_pages_exist() -> None:
    """Each value that a page gives to an option with choices is one of them."""
    from jaxllm.cli.eval_data import BOS
    from jaxllm.convert.gguf.tensor_types import KINDS
    from jaxllm.evaluate.likelihood.data import PROTOCOLS
    from jaxllm.evaluate.likelihood.sensitivity import GROUPINGS
    from jaxllm.generation.option_table import overflow_names
    from jaxllm.research.needle.grid import POLICIES

    known = {
        "protocol": PROTOCOLS, "bos": BOS, "to-gguf": KINDS, "by": GROUPINGS, "policies": POLICIES,
        "overflow": overflow_names(),
    }  # fmt: skip
    texts = [p.read_text(encoding="utf-8") for p in (ROOT / "README.md", *ROOT.glob("docs/*.md"))]
    regex = rf"--({'|'.join(known)})[ =]([a-zA-Z0-9_.,-]+)"
    found = [
        (name, value)
        for text in texts
        for name, values in re.findall(regex, text)
        for value in values.rstrip(".,").split(",")
    ]
    assert len(found) > 10
    assert [(n, v) for n, v in found if v not in known[n] and v not in ("TYPE", "POLICY")] == []


def test_prompt_from_argument_option_or_file(run: Run, tmp_path: Path) -> None:
    """The argument, -p and -f FILE give the same prompt, without the last newline of the file, and
    with line feeds alone; two tokens have no speed.
    """
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"Once upon\r\n")
    last = ("-n", 2, "--json")
    found = [
        json.loads(run("generate", *words, *last)[1])
        for words in (("demo:llama", "Once upon"), ("-p", "Once upon"), ("-f", file))
    ]
    assert [report["prompt"] for report in found] == ["Once upon"] * 3
    assert found[0]["tokens"] == found[1]["tokens"] == found[2]["tokens"]
    assert found[0]["tokens_per_second"] is None
    err = run("generate", "-p", "Once", "-n", 2, "--stop", "\\n")[2]
    assert "tokens/s" not in err
    assert "--stop \\n is taken literally" in err


def test_missing_models_get_fitting_hints(run: Run, tmp_path: Path) -> None:
    """A relative path is no repository of the hub; an adapter's directory names --adapter."""
    assert "hf:" not in run("generate", "./nowhere", "-p", "x")[2]
    assert "write hf:no/where" in run("generate", "no/where", "-p", "x")[2]
    (tmp_path / "adapter_config.json").write_text("{}")
    assert f"--adapter {tmp_path}" in run("generate", tmp_path, "-p", "x")[2]


# Each names a missing path.
MISSING = [
    "generate nowhere -p x",
    "chat nowhere",
    "batch nowhere nowhere.jsonl",
    "info nowhere",
    "convert nowhere out",
    "train lora nowhere out --data x",
]


def test_paths_are_checked_before_importing_jax(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from jaxllm.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    try:\n        main(line.split())\n"
        "    except SystemExit as end:\n        assert end.code == 1, line\n"
        "    assert 'jax' not in sys.modules, line\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *MISSING], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == len(MISSING)
    assert list(tmp_path.iterdir()) == []


def test_text_option_accepts_text_file_or_stdin(
    run: Run, shallow: Callable[[str], Path], tmp_path: Path
) -> None:
    """The three spellings of --text score the same; a file without @ is refused with a remedy."""
    text = "Once upon a time there was a girl."
    file = tmp_path / "story.txt"
    file.write_text(text)
    command = ("perplexity", shallow("llama"), "--window", 8, "--json", "--text")
    found = [run(*command, text), run(*command, f"@{file}"), run(*command, "-", stdin=text)]
    assert [status for status, _, _ in found] == [0, 0, 0]
    assert found[0][1] == found[1][1] == found[2][1]
    assert_refused(run, f"write @{file} to read it", *command, file)


def test_stop_is_also_generic_option(run: Run) -> None:
    """-o stop=X equals --stop X."""
    command = ("generate", "-p", "Once upon", "-n", 12)
    stopped = run(*command, "--stop", "a")
    assert "a" not in stopped[1]
    assert run(*command, "-o", "stop=a")[1] == stopped[1]


def test_seed_is_random_and_printed(run: Run, shallow: Callable[[str], Path]) -> None:
    """Sampling prints its random seed, which reproduces the text; greedy decoding prints none."""
    sampled = ("generate", shallow("llama"), "Once", "-n", 8, "-t", 1.5)
    out, err = succeed(run, *sampled)
    (seed,) = re.findall(r"; seed (\d+);", err)
    report = json.loads(run(*sampled, "--seed", seed, "--json")[1])
    assert (report["text"], report["seed"]) == (out, int(seed))
    others = [
        json.loads(run(*sampled, *more, "--json")[1])["seed"] for more in ((), RANDOM, OPTION)
    ]
    assert len({int(seed), *others}) == 4
    assert "seed" not in run(*sampled[:-2])[2]
    assert_refused(run, "--seed must be", *sampled, "--seed", "x")


RANDOM, OPTION = ("--seed", "random"), ("-o", "seed=random")


def test_sampling_flags_equal_options(run: Run, shallow: Callable[[str], Path]) -> None:
    """--min-p, --repetition-penalty and -t equal -o; invalid names and values are refused."""
    command = ("generate", shallow("llama"), "Once", "-n", 8, "--seed", 5, "--json")
    flags = ("--min-p", 0.2, "--repetition-penalty", 1.3, "-t", 1.2)
    options = ("-o", "min_p=0.2", "-o", "repetition_penalty=1.3", "-o", "temperature=1.2")
    found = [json.loads(run(*command, *more)[1])["tokens"] for more in (flags, options)]
    assert found[0] == found[1]
    assert_refused(run, "", "batch", shallow("llama"), "-", "--seed", "random", stdin='"x"')
    with pytest.raises(SamplingError, match="temp: use temperature"):
        jaxllm.make_sampler(temp=0.7)


def test_generate_applies_chat_template(
    run: Run, shallow: Callable[[str], Path], tmp_path: Path
) -> None:
    """--chat applies the model's template; without it, a note names the option."""
    model = shutil.copytree(shallow("llama"), tmp_path / "model")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (model / name).unlink(missing_ok=True)
    (model / "chat_template.jinja").write_text("One day {{ messages[0].content }} said")
    command = ("generate", model, "Tom", "-n", 4)
    status, out, err = run(*command, "--chat")
    assert (status, "--chat" in err) == (0, False)
    tokens = jaxllm.load(model).chat_prompt([{"role": "user", "content": "Tom"}])
    assert out == jaxllm.load(model).generate(tokens, max_new_tokens=4).text
    assert "--chat applies it" in run(*command)[2]


def test_generate_without_tokenizer_accepts_ids(run: Run, tmp_path: Path) -> None:
    """Token ids work without a tokenizer; a text is refused with the remedy."""
    save_random(tmp_path, "llama")
    status, out, _ = run("generate", tmp_path, "[1, 5]", "-n", 3)
    assert (status, len(out.split())) == (0, 3)
    message = "list of token ids, as in -p '[1, 5]'"
    assert_refused(run, message, "generate", tmp_path, "Once", "-n", 3)
