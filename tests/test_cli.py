"""The command line: output, files, options and errors of the main commands."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import typer
from safetensors import safe_open

import jaxllm
from jaxllm import cli
from jaxllm.checkpoints import resolve
from jaxllm.checkpoints.resolve import DEMO_DIR
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.tokenizer import Tokenizer
from tests.conftest import ROOT, Run, assert_refused, succeed
from tests.tiny_models import save_random


@pytest.fixture
def whole_demos() -> None:
    """Request the demo models with all their layers."""


@pytest.fixture(autouse=True)
def _shallow_demos(
    request: pytest.FixtureRequest, shallow_demos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use only the first layers of the demos, which compile sooner."""
    if "whole_demos" not in request.fixturenames:
        monkeypatch.setattr(resolve, "DEMO_DIR", shallow_demos)


def test_greedy_from_bos_prints_published_story(run: Run, data: Any) -> None:
    directory = data("stories260K")
    out, err = succeed(run, "generate", directory, "-n", 200)
    assert out == (directory / "greedy_200.txt").read_text(encoding="utf-8")
    assert "200 tokens (length)" in err
    assert "tokens/s" in err


@pytest.mark.usefixtures("whole_demos")
@pytest.mark.parametrize("model", ["demo:llama", "demo:gpt2"])
def test_generate_reads_prompt_from_stdin(run: Run, model: str) -> None:
    """A demo generates text from stdin, equal to the same prompt given by option."""
    out, _ = succeed(run, "generate", model, "-p", "-", "-n", 30, stdin="Once upon a time\n")
    assert len(out.split()) > 10
    assert "�" not in out
    again = run("generate", model, "-p", "Once upon a time", "-n", 30)
    assert again[1] == out


def test_json_output_equals_text_output(run: Run) -> None:
    """--json has the text, ids, log-probs and finish reason; --echo prepends the prompt."""
    arguments = ("generate", "-p", "One day", "-n", 12)
    _, text, _ = run(*arguments)
    _, out, _ = run(*arguments, "--json")
    report = json.loads(out)
    assert report["text"] == text
    assert len(report["tokens"]) == len(report["logprobs"]) == 12
    assert report["finish_reason"] == "length"
    _, echoed, _ = run(*arguments, "--echo")
    assert echoed == "One day" + text


def test_prompt_cache_is_reused_and_extended(run: Run, tmp_path: Path) -> None:
    """The file saves prefill and is extended; another text, model or dtype is refused, and the file
    stays unchanged.
    """
    file = tmp_path / "story.cache"
    text = "Once upon a time there was"

    def story(prompt: str, *options: object) -> tuple[int, str, str]:
        return run("generate", "-p", prompt, "-n", 12, *options)

    _, plain, _ = story(text)
    _, out, err = story(text, "--prompt-cache", file)
    assert out == plain
    assert f"{file}: " in err
    assert "tokens written" in err
    held = int(err.split(f"{file}: ")[1].split()[0])
    _, out, err = story(text + plain, "--prompt-cache", file)
    assert out == story(text + plain)[1]
    assert f"{held} of the prompt's {held + 1} tokens are cached; the file holds {held}," in err
    assert f"{held + 12} tokens written" in err
    whole = file.read_bytes()
    for refused, options in {
        "caches another text": ("-p", "One day"),
        "model_type": ("-p", text, "demo:gpt2"),
        "has weights 'float16', the model's 'float32'": ("-p", text, "--dtype", "float32"),
    }.items():
        assert_refused(run, refused, "generate", *options, "--prompt-cache", file)
    assert file.read_bytes() == whole


def test_generate_accepts_any_option(run: Run) -> None:
    """--stop, -o and --overflow set options; invalid names and values are refused."""
    base = ("generate", "-p", "Once upon a time", "-n", 16)
    _, plain, _ = run(*base)
    stop = plain[6:10]
    _, out, err = run(*base, "--stop", stop, "--stop", "never")
    assert out == plain.split(stop)[0]
    assert "(stop)" in err
    out, err = succeed(run, *base, "-o", "num_beams=3", "-o", "num_return_sequences=2")
    assert len(out.splitlines()) == 2
    assert "--- 1 (score -" in err
    _, out, _ = run(*base, "-o", "num-beams=3", "--json")
    assert json.loads(out)["score"] < 0
    _, out, _ = run(*base, "-o", "repetition_penalty=9.0", "-o", "stop_strings=zzz")
    assert out != plain
    for options, message in {
        ("-o", "num_beams"): "NAME=VALUE",
        ("-o", "beams=3"): "no option beams",
        ("--overflow", "wrap"): "overflow must be one of",
        ("-o", "min_p=7"): "min_p must be",
    }.items():
        assert_refused(run, message, *base, *options)


def test_batch_processes_prompts_line_by_line(run: Run, tmp_path: Path, shallow: Any) -> None:
    """Each line gives a completion or an error under its id; the same command has nothing left to
    do, and another file is not overwritten; stdin works.
    """
    options = (shallow("llama"), "--dtype", "float32")
    lines = [
        '"Once upon a time"',
        '{"prompt": "One day", "id": "b", "max_new_tokens": 5, "temperature": 1.0, "seed": 3}',
        "",
        '{"prompt": "Once", "stop_strings": ["."], "max_new_tokens": 60}',
        "{broken",
        '{"text": "no prompt"}',
        '{"prompt": [1, 999999], "id": "outside"}',
        '{"prompt": "x", "temperature": -1}',
        '{"prompt": "x", "num_beams": 2}',
    ]
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    batch = ("batch", *options, file, "--out", out, "-n", 12, "--batch-size", 2)
    status, _, err = run(*batch)
    assert status == 1
    assert "8 answers" in err
    assert "5 of them errors" in err
    answers = {a["id"]: a for a in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    assert answers[1]["text"] == run("generate", "-p", "Once upon a time", "-n", 12, *options)[1]
    single = ("generate", "-p", "One day", "-n", 5, "--temperature", 1.0, "--seed", 3)
    assert answers["b"]["text"] == run(*single, *options)[1]
    assert answers[4]["finish_reason"] == "stop"
    assert "." not in answers[4]["text"]
    assert "line 5 is not valid JSON" in answers[5]["error"]
    assert "line 6 has no prompt" in answers[6]["error"]
    assert "vocabulary" in answers["outside"]["error"]
    assert "temperature must be" in answers[8]["error"]
    assert "does not take num_beams" in answers[9]["error"]
    content = out.read_bytes()
    status, _, err = run(*batch)
    assert status == 1
    assert "8 rows are done, 0 to go" in err
    assert out.read_bytes() == content
    other = ("batch", *options, file, "--out", file)
    assert_refused(run, f"{file} exists: name another file", *other)
    output, _ = succeed(run, "batch", *options, "-", "-n", 12, stdin='"One day"')
    assert json.loads(output)["finish_reason"] == "length"


def test_cache_dtype_accepts_int8(run: Run) -> None:
    out, _ = succeed(run, "generate", "-p", "Once upon a time", "-n", 20, "--cache-dtype", "int8")
    assert len(out.strip()) > 20


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_demo_chat_template_joins_messages(model: str) -> None:
    """The chat template of the demos renders a conversation as one story."""
    talk = [
        {"role": "system", "content": "A story."},
        {"role": "user", "content": "Once"},
        {"role": "assistant", "content": " upon a time"},
        {"role": "user", "content": "Then"},
    ]
    text = ChatTemplate.from_directory(DEMO_DIR / model).render(talk)
    assert text == "<|bos|>A story. Once upon a time Then"


def test_chat_keeps_context_until_reset(run: Run) -> None:
    def answers(*lines: str) -> list[str]:
        return run("chat", "-n", 8, stdin="\n".join(lines))[1].splitlines()

    first, second = answers("Tom had a red ball.", "He")
    assert answers("Tom had a red ball.", "/reset", "He") == [first, answers("He")[0]]
    assert second != answers("He")[0]


def test_chat_beyond_context_continues(run: Run) -> None:
    """A message beyond the context is refused, or drops the oldest turns with --overflow slide."""
    chat = ("chat", "-n", 8)
    long = "Once upon a time there was a girl. " * 25 + "\n"
    status, out, err = run(*chat, stdin=long * 3 + "/reset\nOne day\n")
    assert status == 1
    assert out.count("\n") == 3
    refused, forgotten = err.splitlines()
    assert "expected at most 512 in total. Use /undo, /reset or /set overflow slide" in refused
    assert forgotten == "all messages removed"
    status, out, err = run(*chat, "--overflow", "slide", stdin=long * 3)
    assert (status, out.count("\n")) == (0, 3)
    assert err == "(dropped the 1 oldest turns)\n"


def test_invalid_arguments_are_refused_before_loading(run: Run, tmp_path: Path) -> None:
    """The model is an empty directory, so a message on another argument comes before loading."""
    none = tmp_path / "none"
    none.mkdir()
    prompts, story = tmp_path / "prompts.jsonl", tmp_path / "story.txt"
    prompts.write_text('"One day"\n')
    story.write_text("One day")
    away = tmp_path / "away" / "x.npy"
    nowhere = f"{away}: {away.parent} is not a directory"
    for arguments, message in {
        ("batch", none, prompts, "--out", away): nowhere,
        ("batch", none, prompts, "--out", tmp_path): "a directory has this name",
        ("batch", none, away): f"cannot read {away}",
        ("batch", none, prompts, "--out", "x.parquet"): "appended as JSON lines",
        ("batch", none, prompts, "--task", "scores"): "did you mean score",
        ("batch", none, prompts, "--task", "score", "-n", 5): "leave out --max-new-tokens",
        ("batch", none, prompts, "--task", "embed", "-o", "pool=cls"): "no option pool",
        ("batch", none, prompts, "--workers", 2): "--workers requires --ray",
        ("generate", none, "--prompt-cache", away): nowhere,
        ("generate", none, "-o", "stop_strings=[1"): "--option stop_strings is not valid",
        ("generate", none, "-o", f"seed={'9' * 5000}"): "5,000 digits",
        ("generate", none, "--precision", story): "--precision: ",
        ("embed", none, "--text", "x", "--out", away): nowhere,
        ("perplexity", none, "--text", f"@{story}", "--journal", away): nowhere,
        ("sensitivity", none, "--text", f"@{story}", "--plot", away): nowhere,
        ("verify", none, "--plot", away): nowhere,
        ("convert", none, story): "is not a directory",
        ("quantize", none, story / "x"): "no such folder",
        ("export", none, story): "is not a directory",
        ("vectors", "make", none, story): "is not a directory",
    }.items():
        assert_refused(run, message, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [("generate", "-p", "-"), ("chat",), ("embed", "--file", "-"), ("perplexity", "--text", "-")],
    ids=lambda arguments: arguments[0],
)
def test_invalid_utf8_stdin_is_one_line(run: Run, arguments: tuple[str, ...]) -> None:
    assert_refused(run, "stdin is not UTF-8 text (byte 5)", *arguments, stdin=b"One d\xe9y\n")


def test_version_and_help_without_arguments(run: Run) -> None:
    assert run("--version") == (0, f"jaxllm {jaxllm.__version__}\n", "")
    assert run()[:2] == run("--help")[:2]


def test_info_counts_parameters_from_shapes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, bytes and cache bytes per token are the closed form's; no tokenizer is built."""
    save_random(tmp_path, "llama")
    monkeypatch.setattr(Tokenizer, "from_tree", None)
    assert json.loads(run("info", "demo:llama", "--json")[1])["tokenizer"]
    _, out, _ = run("info", tmp_path, "--json")
    facts = json.loads(out)
    heads = 3 * 40 * (2 * 8 * 6 + 2 * 2 * 6)  # q, o and k, v
    expected = 2 * 131 * 40 + heads + 3 * (3 * 40 * 56 + 2 * 40) + 40
    assert facts["parameters"] == expected
    assert facts["bytes"] == 4 * expected
    assert facts["cache_bytes_per_token"] == 2 * 3 * 2 * 6 * 4
    _, table, _ = run("info", tmp_path)
    assert "parameters" in table
    assert f"{expected:,}" in table


FORMATS = {
    (): "int8",
    ("--bits", 8, "--group", 32, "--half-scales"): "int8-g32-f16",
    ("--bits", 4): "int4-g64",
    ("--bits", 4, "--group", 128, "--zero-point"): "int4-g128-zp",
    ("--format", "bf16-packed", "--dtype", "bfloat16"): "bf16-packed",
}


FEW = ("int4-g128-zp", "bf16-packed")  # `make test-full` runs the others


@pytest.mark.parametrize(
    "options",
    [pytest.param(o, marks=() if n in FEW else pytest.mark.full, id=n) for o, n in FORMATS.items()],
)
def test_quantize_writes_requested_format(
    run: Run, tmp_path: Path, options: tuple[object, ...]
) -> None:
    save_random(tmp_path / "hf", "llama", num_hidden_layers=1)
    status, out, err = run("quantize", tmp_path / "hf", tmp_path / "small", *options)
    assert (status, out) == (0, "")
    assert "9 matrices in" in err
    facts = json.loads(run("info", tmp_path / "small", "--json")[1])
    assert (facts["form"], facts["quantized"]) == ("jaxllm", FORMATS[options])
    formats = json.loads((tmp_path / "small" / "config.json").read_text())["formats"]
    assert formats["layers.0.mlp.up_proj.weight"] == FORMATS[options]
    table = "int8" if FORMATS[options].startswith("int4") else FORMATS[options]
    assert formats["embed_tokens.weight"] == formats["lm_head.weight"] == table
    assert len(formats) == 9
    if not options:  # int8 padded to 128 columns, a float32 scale per row, float norms
        rows = 2 * 131 + (48 + 12 + 12 + 40) + (56 + 56 + 40)
        assert facts["bytes"] == rows * 128 + 4 * rows + 4 * 3 * 40


def test_quantize_applies_rules(run: Run, tmp_path: Path) -> None:
    save_random(tmp_path / "hf", "gpt2", n_layer=1)
    rules = [[r"h\.0\.attn\..*", None], [r"h\..*", "int4-g32"], ["wte.weight", "float16"]]
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    small = tmp_path / "small"
    succeed(run, "quantize", tmp_path / "hf", small, "--rules", tmp_path / "rules.json")
    with safe_open(small / "model.safetensors", framework="numpy") as file:
        found = {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    assert found["h.0.mlp.c_fc.weight.data"] == found["h.0.mlp.c_proj.weight.data"] == "U8"
    assert found["h.0.attn.c_attn.weight"] == found["wpe.weight"] == "F32"
    assert found["wte.weight"] == "F16"
    _, table, _ = run("info", small)
    assert "int4-g32" in table


def test_quantize_refuses_before_writing(run: Run, tmp_path: Path) -> None:
    small, taken, broken = tmp_path / "small", tmp_path / "taken", tmp_path / "broken.json"
    taken.mkdir()
    (taken / "config.json").write_text("mine")
    broken.write_text('[["wte.weight"]]')
    for arguments, message in {
        ("demo:llama", taken): "already holds a checkpoint",
        ("demo:llama", small, "--bits", 5): "weight format must be one of",
        ("demo:llama", small, "--group", 48): "group size must be 32, 64 or 128 columns",
        ("demo:llama", small, "--bits", 3, "--group", 16): "group size must be 32, 64 or 128",
        ("demo:llama", small, "--rules", broken): f"--rules {broken}",
        ("demo:llama", small, "--rules", "nowhere.json"): "--rules: cannot read nowhere.json",
    }.items():
        assert_refused(run, message, "quantize", *arguments)
        assert not small.exists()
    assert [file.read_text() for file in taken.iterdir()] == ["mine"]


def test_format_from_file_option_and_table_agree(run: Run, tmp_path: Path) -> None:
    """A quantized file, --quantize and a table give equal log-probs; invalid ones are refused."""
    small, table = tmp_path / "small", tmp_path / "formats.json"
    story = ("generate", "-p", "Once upon a time", "-n", 12, "--json")
    options = ("--bits", 4, "--group", 32, "--zero-point", "--half-scales")
    assert run("quantize", "demo:llama", small, *options)[0] == 0
    table.write_text('{"quantize": "int4-g32-zp-f16"}')

    def logprobs(*more: object) -> list[float]:
        out, _ = succeed(run, *story, *more)
        return list(json.loads(out)["logprobs"])

    by_file = logprobs(small)
    assert logprobs("--quantize", "int4-g32-zp-f16") == by_file
    assert logprobs("--precision", table) == by_file
    assert logprobs() != by_file
    table.write_text('[["layers.0", {"activation": "float32"}]]')
    for options_, message in {
        ("--precision", table): "activation",
        ("--precision", tmp_path / "none.json"): "--precision",
        ("--quantize", "int5"): "got 'int5'",
    }.items():
        assert_refused(run, message, "generate", *options_)


@pytest.mark.usefixtures("whole_demos")
def test_bench_figures_are_consistent(run: Run) -> None:
    """Prompts beyond the context are skipped; 2.1 MB of weights per token give GB/s and the share
    of the bandwidth.
    """
    tiny = ("bench", "--decode", 2, "--batches", 1, "-r", 2)
    out, err = succeed(run, *tiny, "--prompts", "8,600", "--depths", "", "--json")
    assert "pp600: skipped, longer than the model's context of 512" in err
    found = json.loads(out)
    assert ([row["test"] for row in found["rows"]], found["weights_mb"]) == (["pp8"], 2.1)
    assert {"backend", "threads", "kernels", "peak_mb", "load_s", "jax"} <= found.keys()
    out, _ = succeed(run, *tiny, "--prompts", "", "--depths", 3, "--csv")
    (row,) = csv.DictReader(out.splitlines())
    assert row["test"] == "tg2 @ d3"
    rate, streamed = float(row["tokens_per_second"]), float(row["weights_gb_s"])
    assert streamed == pytest.approx(rate * 2.10e-3, rel=0.02, abs=0.01)
    share = streamed / float(row["bus_gb_s"])
    assert float(row["share_of_bus"]) == pytest.approx(share, abs=0.002)
    out, _ = succeed(run, *tiny, "--prompts", "", "--depths", 0, "--cache-dtype", "int8")
    assert out.splitlines()[2].startswith("| tg2 |")


def test_convert_round_trip_keeps_dtype(run: Run, tmp_path: Path) -> None:
    save_random(tmp_path / "hf", "gpt2")
    _, err = succeed(run, "convert", tmp_path / "hf", tmp_path / "native", "--dtype", "bfloat16")
    assert "bfloat16" in err
    assert json.loads(run("info", tmp_path / "native", "--json")[1])["form"] == "jaxllm"
    command = [sys.executable, "-m", "convert", tmp_path / "native", tmp_path / "back", "--to-hf"]
    subprocess.run(command, check=True, cwd=ROOT)
    assert json.loads(run("info", tmp_path / "back", "--json")[1])["dtype"] == "bfloat16"


@pytest.mark.parametrize("command", (*cli.COMMANDS, "plan", "recall", "upcycle"))
def test_help_has_parsable_example(run: Run, command: str) -> None:
    out, _ = succeed(run, command, "--help")
    shown = re.search(r"Examples?:(.*)", out, re.DOTALL)
    assert shown
    assert f"jaxllm {command}" in shown[1]
    group = typer.main.get_command(cli.make_app())
    assert isinstance(group, typer.core.TyperGroup)
    examples = re.findall(r"jaxllm (\S+) (.*)", cli.import_command(command).EXAMPLE)
    assert examples
    for name, arguments in examples:
        assert name == command
        group.commands[name].make_context(name, shlex.split(arguments))


def test_help_imports_no_heavy_modules() -> None:
    code = (
        "import sys\nsys.argv = ['jaxllm', '--help']\n"
        "from jaxllm.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'jax', 'flax', 'numpy', 'torch', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.full
def test_compile_cache_is_reused_by_next_process(tmp_path: Path) -> None:
    """A second process compiles nothing, the folder is 0700, and the text equals the uncached."""
    code = "from jaxllm.__main__ import main; main()"
    command = [sys.executable, "-c", code, "generate", "-p", "One day", "-n", "8"]
    programs, stories = [], []
    plain = {name: x for name, x in os.environ.items() if not name.startswith("JAX_")}
    for folder in (tmp_path, tmp_path, "0"):
        env = {**plain, "JAXLLM_COMPILE_CACHE": str(folder), "HOME": str(tmp_path / "home")}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
        assert done.returncode == 0, done.stderr
        stories.append(done.stdout)
        programs.append(sorted(p.name for p in tmp_path.glob("compiled-*/*-cache")))
    assert len(set(stories)) == 1
    assert programs[0]
    assert programs[1] == programs[0], "the second process must reuse the programs of the first"
    (folder,) = tmp_path.glob("*")
    assert folder.stat().st_mode & 0o777 == 0o700, "other users must not be able to write programs"


def test_closed_output_pipe_is_no_error() -> None:
    """If the reader of a pipe stops early, generate exits with status 0 and no traceback."""
    command = f"{sys.executable} -m jaxllm generate -n 60 | head -c 5"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, cwd=ROOT)
    assert done.returncode == 0
    assert len(done.stdout) == 5
    assert b"Traceback" not in done.stderr


def test_full_memory_is_told_in_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation that fails names what fills the memory; 128 TB fit nowhere."""
    held = jnp.zeros((1, 100, 1000, 1000), jnp.int8)
    monkeypatch.setattr(jaxllm.LM, "stream", lambda *_, **__: jnp.zeros(1 << 45, jnp.float32))
    monkeypatch.setattr(jaxllm.LM, "generate", lambda *_, **__: jnp.zeros(1 << 45, jnp.float32))
    told = "140737488355328 bytes could not be had for temporary arrays or a cache, beside 0.1"
    assert_refused(run, told, "generate", "demo:llama", "x")
    del held
