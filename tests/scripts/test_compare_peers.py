"""Contenders are timed in turns on the same work, and ratios are those of their medians."""

import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import compare_peers
import numpy as np
import peer_engines
import pytest
import torch
import transformers
import typer
from compare_peers import Comparison
from peer_engines import Contender, LlamaBench
from safetensors import safe_open

import jaxllm
from jaxllm import bench
from jaxllm.bench import Test as Work  # a name that pytest does not collect
from jaxllm.cli import run_command
from jaxllm.errors import ConfigError
from jaxllm.located import DEMOS

READ, WROTE = Work(prompt=8), Work(decode=2, depth=8)
MS = 1_000_000
# As llama-bench -o json prints it, less what is about GPUs.
LLAMA_ROW = {
    "build_commit": "0c1e570", "build_number": 1, "cpu_info": "AMD EPYC", "backends": "CPU",
    "model_filename": "m.gguf", "model_type": "llama 1B Q8_0", "model_size": 5000,
    "model_n_params": 4000, "n_batch": 2048, "n_ubatch": 512, "n_threads": 2, "type_k": "f16",
    "n_prompt": 0, "n_gen": 2, "n_depth": 0, "test_time": "2026-11-21T16:23:18Z",
}  # fmt: skip


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def fake_llama_bench(directory: Path, *milliseconds: int) -> Path:
    """Prints the first figure on the first call with some options, and so on; logs its options."""
    log, rows = directory / "calls.txt", []
    for ms in milliseconds:
        samples = {"avg_ns": ms * MS, "stddev_ns": 0, "samples_ns": [ms * MS]}
        rows.append(json.dumps([LLAMA_ROW | samples]))
    cases = "\n".join(f"{i}) echo '{row}';;" for i, row in enumerate(rows, 1))
    script = f'echo "$*" >> {log}\ncase $(grep -cxF -e "$*" {log}) in\n{cases}\nesac'
    return program(directory / "llama-bench", script)


class Scripted(Contender):
    """Takes the seconds that it was told to, in order; an exception is raised."""

    def __init__(self, peer: str, fmt: str, seconds: list[Any], log: list[str]) -> None:
        super().__init__(peer, fmt)
        self.left, self.log = {test: list(seconds) for test in (READ, WROTE)}, log
        self.weights = 3e9

    def measure(self, test: Work) -> float:
        self.log.append(self.name)
        taken = self.left[test].pop(0)
        if isinstance(taken, Exception):
            raise taken
        return float(taken)


def compared(log: list[str], rounds: int, *contenders: Contender) -> Comparison:
    comparison, readings = Comparison(contenders, [READ, WROTE]), iter(range(10, 99))
    list(comparison.run(rounds, lambda _: next(readings), lambda: None))
    return comparison


def test_ratios_are_of_medians_within_a_precision_and_the_first_run_does_not_count() -> None:
    log: list[str] = []
    comparison = compared(
        log,
        3,
        Scripted("jaxllm", "int8+int8_inputs", [9, 1, 4, 2], log),
        Scripted("jaxllm", "bf16-packed", [9, 1, 1, 1], log),
        Scripted("llama.cpp", "int8", [9, 5, 3, 70], log),
        Scripted("transformers", "bfloat16", [9, 8, 8, 8], log),
    )
    results = {(r["test"], r["engine"]): r for r in comparison.results()}
    ours = results["tg2 @ d8", "jaxllm int8+int8_inputs"]
    assert ours["tokens_per_second"] == 1.0  # 2 tokens in 2 s, the median of 1, 4, 2
    assert ours["ratios"] == {"llama.cpp": 2.5}  # its median is 5 s
    assert ours["spread"] == pytest.approx(np.std([2, 0.5, 1], ddof=1), abs=0.005)
    assert ours["compile_s"] == 7  # 9 less 2
    assert ours["weights_gb_s"] == 3.0  # 3 GB a token, 2 tokens in 2 s
    # The bus was read as 10, 11 in the first round, then 12, 13 and so on to 17.
    assert (ours["bus_gb_s"], ours["share_of_bus"]) == (17, pytest.approx(3 / 17, abs=5e-4))
    assert results["tg2 @ d8", "jaxllm bf16-packed"]["ratios"] == {"transformers": 8.0}
    assert results["pp8", "jaxllm bf16-packed"]["share_of_bus"] is None
    assert results["pp8", "llama.cpp int8"]["ratios"] == {}

    text = compare_peers.as_markdown({"cpu": "C", "cores": 2}, comparison.results())
    assert text.startswith("cpu C, cores 2\n\n### pp8\n")
    assert "| jaxllm int8+int8_inputs | 1.00 | 0.76 |  | 2.50x | 18% of 17.0 |" in text
    assert "| transformers bfloat16 | 1.00 | 0.00 |  |  |  |" in text  # 8 tokens in 8 s


def test_the_order_rotates_from_round_to_round() -> None:
    log: list[str] = []
    names = [("jaxllm", "int8"), ("jaxllm", "int4"), ("llama.cpp", "int8")]
    compared(log, 3, *(Scripted(*name, [1] * 4, log) for name in names))
    a, b, c = (" ".join(name) for name in names)
    assert log == [*[a, b, c] * 2, *[b, c, a] * 2, *[c, a, b] * 2, *[a, b, c] * 2]


def test_what_fails_is_left_out_by_name_and_keeps_what_it_had(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log: list[str] = []
    fails = Scripted("llama.cpp", "int8", [9, 2, ConfigError("out of order"), 9], log)
    never = Scripted("transformers", "float32", [ConfigError("no such thing")], log)
    works = Scripted("jaxllm", "int8", [9, 1, 1, 1], log)
    comparison = compared(log, 3, works, fails, never)
    rows = {r["engine"]: r for r in comparison.results() if r["test"] == "pp8"}
    assert {name: r["seconds"] for name, r in rows.items()} == {
        "jaxllm int8": (1, 1, 1),
        "llama.cpp int8": (2,),
    }
    assert rows["jaxllm int8"]["ratios"] == {"llama.cpp": 2.0}
    assert log.count(fails.name) == 2 * 3 and log.count(never.name) == 2
    noted = capsys.readouterr().err
    assert "llama.cpp int8, pp8: left out: out of order\n" in noted
    assert "transformers float32, tg2 @ d8: left out: no such thing\n" in noted


def test_a_busy_machine_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # 200 ticks later 150 of them were work (40 of these stolen), 50 were idle or waiting for disks.
    lines = ["cpu  100 0 100 700 100 0 0 0 0 0", "cpu  190 5 110 740 110 3 2 40 9 9"]
    texts = iter(f"{line}\ncpu0 1 2 3 4 5 6 7 8 0 0\n" for line in lines)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_, **__: next(texts))
        patch.setattr(os, "cpu_count", lambda: 4)
        taken = compare_peers.cores_taken(0)
    assert taken == 3.0  # three quarters of 4 cores

    monkeypatch.setattr(compare_peers, "cores_taken", lambda: taken)
    comparison = compared([], 1, Scripted("jaxllm", "int8", [1, 1], []))
    assert capsys.readouterr().err.count("other programs use 3.0 cores") == 2
    machine = compare_peers.about_machine(comparison, 2)
    assert machine["cores others used"] == 3.0
    said = "Other programs were running"
    assert said in compare_peers.as_markdown(machine, comparison.results())
    assert said not in compare_peers.as_markdown({"cores others used": 0.1}, [])


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's load is not waited for."""
    cores_taken = compare_peers.cores_taken
    monkeypatch.setattr(compare_peers, "cores_taken", lambda s=0.01: cores_taken(s))


def test_llama_bench_is_asked_for_the_test_and_its_answer_read(tmp_path: Path) -> None:
    binary = fake_llama_bench(tmp_path, 250)
    llama = LlamaBench("int8", tmp_path / "m.gguf", binary, None, 3, untied=1000)
    assert llama.measure(READ) == 0.25 and llama.measure(WROTE) == 0.25
    common = f"-m {tmp_path}/m.gguf -t 3"
    assert (tmp_path / "calls.txt").read_text().splitlines() == [
        f"{common} -p 8 -n 0 -d 0 -r 1 -o json",
        f"{common} -p 0 -n 2 -d 8 -r 1 -o json",
    ]
    assert llama.weights == 3750  # 5000 bytes less the quarter that is the embedding
    assert llama.build == "1 (0c1e570)"


def test_rows_at_once_are_read_from_llama_batched_bench(tmp_path: Path) -> None:
    row = {"n_kv_max": 512, "pp": 1, "tg": 2, "pl": 8, "t_pp": 0.2, "t_tg": 1.5, "speed_tg": 10.7}
    script = f"echo \"$*\" > {tmp_path}/calls.txt; echo; echo '{json.dumps(row)}'; echo llama_perf"
    batched = program(tmp_path / "batched", script)
    args = ("int8", tmp_path / "m.gguf", tmp_path / "gone")
    assert LlamaBench(*args, batched, 2, 0).measure(Work(decode=256, batch=8)) == 1.5
    # Every row has the 257 slots that it needs, in blocks of 256.
    assert (tmp_path / "calls.txt").read_text().split()[4:] == [
        *("-npp", "1", "-ntg", "256", "-npl", "8", "-c", str(512 * 8)),
        *("--output-format", "jsonl"),
    ]
    with pytest.raises(ConfigError, match="--llama-batched-bench is needed"):
        LlamaBench(*args, None, 2, 0).measure(Work(decode=2, batch=8))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo usage: >&2; echo bad option >&2; exit 3", "ended with code 3: bad option"),
        ("echo", "something else than expected"),
        ("echo '[]'", "something else than expected"),
        ("echo '[{\"build_number\": 1}]'", "something else than expected: KeyError"),
    ],
)
def test_what_llama_bench_should_not_print_is_refused(
    tmp_path: Path, script: str, message: str
) -> None:
    binary = program(tmp_path / "llama-bench", script)
    with pytest.raises(ConfigError, match=message):
        LlamaBench("int8", tmp_path / "m.gguf", binary, None, 2, 0).measure(READ)


@pytest.fixture
def torch_settings() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("torch_settings")
def test_transformers_does_the_work_that_ours_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens, on a cache of the same length, every time."""
    ours: list[np.ndarray] = []
    default_rng = np.random.default_rng

    class Recorded:
        def __init__(self, seed: int) -> None:
            self.generator = default_rng(seed)

        def integers(self, *args: Any) -> np.ndarray:
            drawn.append(self.generator.integers(*args))
            return drawn[-1]

    lm = jaxllm.load("demo:llama")
    tests = [READ, WROTE, Work(decode=2, batch=3)]
    with monkeypatch.context() as patch:
        patch.setattr(np.random, "default_rng", Recorded)
        patch.setattr(bench, "prefill", lambda *_, **__: (None, None))  # what it reads is drawn
        for test in tests:
            drawn: list[np.ndarray] = []
            bench.prepared(lm, test, 512)
            ids_BT, *more = drawn
            ours += [ids_BT] if test.prompt or test.depth else []
            ours += [token_B[:, None] for token_SB in more for token_B in token_SB]
    assert [x.shape for x in ours] == [(1, 8), (1, 8), (1, 1), (1, 1), (3, 1), (3, 1)]

    theirs: list[tuple[np.ndarray, int]] = []
    load = transformers.AutoModelForCausalLM.from_pretrained

    def seen(module: Any, args: tuple[torch.Tensor], kwargs: dict[str, Any]) -> None:
        theirs.append((args[0].numpy(), kwargs["past_key_values"].get_seq_length()))

    def hooked(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        model.register_forward_pre_hook(seen, with_kwargs=True)
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", hooked)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    measure, weights = peer_engines.load_transformers(str(DEMOS / "llama"), "float32")
    with safe_open(DEMOS / "llama" / "model.safetensors", "np") as file:
        count = sum(np.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert weights == 4 * count  # the embedding is tied: all of it is read
    for test in tests:
        assert measure(test) > 0
    for (ids_BT, _), expected_BT in zip(theirs, ours, strict=True):
        np.testing.assert_array_equal(ids_BT, expected_BT)
    assert [length for _, length in theirs] == [0, 0, 8, 9, 0, 1]
    measure(WROTE)
    assert [length for _, length in theirs[6:]] == [8, 9]  # the cache is as it was


@dataclasses.dataclass(frozen=True)
class Run:
    results: dict[tuple[str, str], dict[str, Any]]
    machine: dict[str, Any]
    calls: list[str]
    stdout: str
    written: str
    stderr: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A whole run on the demo with all kinds of contenders."""
    out = tmp_path_factory.mktemp("peers")
    (out / "m.gguf").touch()
    options: dict[str, Any] = {"formats": "float32,int8+int8_inputs", "torch_dtypes": "float32"}
    options |= {"prompts": "8", "depths": "8,512", "batches": "", "form": "json"}
    files = [f"float32={out}/m.gguf", f"int8={out}/m.gguf", f"int4={out}/gone.gguf"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        caught: dict[str, list[str]] = {"out": [], "err": []}
        patch.setattr(compare_peers, "write", caught["out"].append)
        patch.setattr(compare_peers, "note", caught["err"].append)
        # Both files are one: each test is asked for four times, the first two to warm up.
        compare_peers.compare_peers(
            "demo:llama",
            **options,
            decode=2,
            rounds=1,
            threads=1,
            gguf=files,
            llama_bench=fake_llama_bench(out, 900, 900, 4, 4),
            out=out / "out.json",
        )
    stdout, stderr = "".join(caught["out"]), "\n".join(caught["err"])
    data = json.loads(stdout)
    results = {(r["test"], r["engine"]): r for r in data["results"]}
    calls = (out / "calls.txt").read_text().splitlines()
    written = (out / "out.json").read_text()
    assert sorted(p.name for p in out.iterdir() if p.name.startswith(".")) == []
    return Run(results, data["machine"], calls, stdout, written, stderr)


@pytest.mark.full
def test_a_run_on_the_demo_times_each_contender_on_each_test(run: Run) -> None:
    engines = ["jaxllm float32", "jaxllm int8+int8_inputs", "transformers float32"]
    engines += ["llama.cpp float32", "llama.cpp int8"]
    assert list(run.results) == [(test, e) for test in ("pp8", "tg2 @ d8") for e in engines]
    for r in run.results.values():
        assert len(r["seconds"]) == 1 and r["seconds"][0] > 0
    assert len(run.calls) == 2 * 2 * 2  # files, tests, and a round beside the first
    assert run.results["tg2 @ d8", "llama.cpp int8"]["tokens_per_second"] == 500  # 2 in 4 ms
    assert run.results["pp8", "llama.cpp int8"]["tokens_per_second"] == 2000
    assert run.written == run.stdout


@pytest.mark.full
@pytest.mark.parametrize("test", ["pp8", "tg2 @ d8"])
def test_a_run_on_the_demo_prints_the_ratios_of_its_seconds(run: Run, test: str) -> None:
    def median(engine: str) -> float:
        return statistics.median(run.results[test, engine]["seconds"])

    ours = median("jaxllm float32")
    expected = {"transformers": median("transformers float32") / ours, "llama.cpp": 0.004 / ours}
    assert run.results[test, "jaxllm float32"]["ratios"] == pytest.approx(expected, abs=5e-4)
    quantized = run.results[test, "jaxllm int8+int8_inputs"]
    expected = {"llama.cpp": 0.004 / median("jaxllm int8+int8_inputs")}
    assert quantized["ratios"] == pytest.approx(expected, abs=5e-4)


@pytest.mark.full
def test_a_run_on_the_demo_names_the_machine_and_what_it_left_out(run: Run) -> None:
    assert run.machine["cores"] == os.cpu_count() and run.machine["threads"] == 1
    assert run.machine["torch"] == torch.__version__
    assert run.machine["llama.cpp"] == "1 (0c1e570)"
    assert "llama.cpp int4: left out, there is no" in run.stderr and "gone.gguf" in run.stderr
    assert "tg2 @ d512: left out, the model's context is 512" in run.stderr


def test_a_missing_package_is_named_and_with_nothing_left_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="nothing to time"):
        compare_peers.compare_peers("demo:llama", formats="", gguf=["int8=gone"])
    noted = capsys.readouterr().err
    assert "transformers bfloat16: left out: ModuleNotFoundError: No module named torch" in noted
    assert "llama.cpp int8: left out, there is no --llama-bench and no gone" in noted


class Started(Scripted):
    """In place of a worker; what it is to raise, it raises in the third of its runs of a test."""

    raises: BaseException | None = None
    closed: ClassVar[list[str]] = []

    def __init__(self, peer: str, fmt: str, directory: Path, threads: int) -> None:
        super().__init__(peer, fmt, [9, 1, 2, 2], [])
        self.left[Work(decode=16)] = [9, 1, 2, 2]

    def ready(self) -> None:
        pass

    def measure(self, test: Work) -> float:
        taken = super().measure(test)
        if taken == 2 and self.raises and self.peer == "jaxllm":
            raise self.raises
        return taken

    def close(self) -> None:
        self.closed.append(self.name)


def test_an_interrupt_loses_nothing_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_peers, "Worker", Started)
    monkeypatch.setattr(Started, "raises", KeyboardInterrupt())
    monkeypatch.setattr(Started, "closed", [])
    options: dict[str, Any] = {"formats": "int8", "prompts": "8", "depths": "", "batches": ""}
    with pytest.raises(typer.Exit) as ended:
        compare_peers.compare_peers(
            "demo:llama", **options, transformers=False, form="json", out=tmp_path / "x"
        )
    assert ended.value.exit_code == 1
    printed = capsys.readouterr()
    for text in (printed.out, (tmp_path / "x").read_text()):
        assert [r["seconds"] for r in json.loads(text)["results"]] == [[1.0]]
    assert "interrupted" in printed.err
    assert sorted(Started.closed) == ["jaxllm int8", "memory bus float32"]


def test_a_disk_that_is_full_loses_nothing_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compare_peers, "Worker", Started)
    monkeypatch.setattr(Path, "replace", full)
    options: dict[str, Any] = {"formats": "int8", "prompts": "8", "depths": "", "batches": ""}
    compare_peers.compare_peers(
        "demo:llama", **options, transformers=False, form="json", out=tmp_path / "x"
    )
    printed = capsys.readouterr()
    assert [r["seconds"] for r in json.loads(printed.out)["results"]] == [[1.0, 2.0, 2.0]]
    assert "No space left on device" in printed.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": "int7"}, "int7"),
        ({"formats": "float32+int8_inputs"}, "float32.int8_inputs"),
        ({"formats": "int8+int4_inputs"}, "int8.int4_inputs"),
        ({"torch_dtypes": "int8"}, "--torch-dtypes"),
        ({"gguf": ["Q8_0=file"]}, "Q8_0"),
        ({"gguf": ["int8=a", "int8=b"]}, "one file a precision"),
        ({"prompts": "many"}, "many"),
        ({"decode": 0}, "decode must be at least 1"),
        ({"form": "csv"}, "csv"),
        ({"out": Path("no/such/directory/x")}, "--out no/such/directory/x"),
    ],
)
def test_impossible_options_are_refused_before_anything_starts(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> Callable[..., None]:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(compare_peers, "Worker", started)
    with pytest.raises(ConfigError, match=message):
        compare_peers.compare_peers("demo:llama", **options)


def test_the_help_has_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_peers.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        run_command(compare_peers.compare_peers, "compare_peers.py", compare_peers.EXAMPLE)
    assert ended.value.code == 0
    assert "Example: python scripts/compare_peers.py" in capsys.readouterr().out
