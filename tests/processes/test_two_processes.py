"""One model over two processes: output, and how both end if one fails or differs."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxllm
from tests.processes.conftest import (
    Start,
    Started,
    child_of,
    ended,
    free_port,
    kill,
    start_both,
    together,
)

PROMPT = "Once upon a time"
MESH = "--mesh", "tensor=2"


@pytest.fixture(scope="module")
def model(shallow_demos: Path) -> Path:
    return shallow_demos / "llama"


def generate(model: Path, *more: str) -> tuple[str, ...]:
    return "generate", str(model), *MESH, "-p", PROMPT, *more


def generating(start: Start, model: Path) -> list[Started]:
    """Start to generate in two processes, and wait for the first text."""
    both = start_both(start, *generate(model, "-n", "400", "-o", "eos_token_id=[]"))
    assert both[0].stdout is not None
    both[0].stdout.read(1)
    return both


def assert_refused(process: Started, *words: str) -> None:
    """Check that the process exits with a one-line error that contains `words`."""
    status, out, err = ended(process)
    assert status == 1 and not out, err
    assert err.startswith("jaxllm: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err, err


def test_generate_over_two_processes_writes_once(start: Start, model: Path) -> None:
    """Process 0 reads stdin and prints the tokens of a single process; process 1 ignores its stdin
    and prints nothing.
    """
    command = "generate", str(model), *MESH, "-p", "-", "-n", "12", "--json"
    first, second = start_both(start, *command)
    status, out, err = ended(first, PROMPT)
    assert status == 0, err
    assert (
        json.loads(out)["tokens"] == jaxllm.load(model).generate(PROMPT, max_new_tokens=12).tokens
    )
    assert ended(second, "Something else") == (0, "", "")


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.full)])
def test_generate_ends_if_peer_is_killed(start: Start, model: Path, killed: int) -> None:
    """If one process is killed while both generate, the other exits with a one-line error."""
    both = generating(start, model)
    kill(both[killed].pid)
    status, _, err = ended(both[1 - killed])
    assert status == 1, err
    assert err.startswith("jaxllm: ") and err.count("\n") == 1, err
    assert "process" in err and "lost" in err


@pytest.mark.full
def test_generate_ends_if_peer_hangs(start: Start, model: Path) -> None:
    """A stopped process keeps its sockets open; the other exits after the heartbeat timeout and
    names its index.
    """
    both = generating(start, model)
    child = child_of(both[1])
    os.kill(child, signal.SIGSTOP)
    status, _, err = ended(both[0])
    assert status == 1 and "process 1 of the group" in err, err
    kill(child)


@pytest.mark.full
def test_rows_split_over_processes_equal_single_process(
    start: Start, model: Path, tmp_path: Path
) -> None:
    """Beams, samples and embeddings with rows split over two processes equal those of
    one process.
    """
    lm = jaxllm.load(model)
    command = str(model), "--mesh", "data=2", "-p", PROMPT, "-n", "8"
    more = [
        {"do_sample": True, "seed": 5, "num_return_sequences": 4},
        {"num_beams": 4, "num_return_sequences": 2},
    ]
    for options in more:
        given = [word for k, v in options.items() for word in ("-o", f"{k}={json.dumps(v)}")]
        (status, out, err), other = together(start, "generate", *command, "--json", *given)
        assert status == 0, err
        assert other == (0, "", "")
        expected = lm.generate(PROMPT, max_new_tokens=8, **options)
        assert [json.loads(line)["tokens"] for line in out.splitlines()] == [
            completion.tokens for completion in expected
        ]
    lines = tmp_path / "lines"
    lines.write_text("".join(f'"{PROMPT[:n]}"\n' for n in range(4, 12)))
    vectors = tmp_path / "vectors.npy"
    shown = "--file", str(lines), "--mesh", "data=2", "--out", str(vectors)
    (status, _, err), _ = together(start, "embed", str(model), *shown)
    assert status == 0, err
    every = lines.read_text().splitlines()
    assert np.allclose(np.load(vectors), lm.embed(every), atol=1e-5)


@pytest.mark.full
def test_generate_refuses_different_weights_across_processes(
    start: Start, model: Path, tmp_path: Path
) -> None:
    """Two directories of one name whose weights differ in one bit are refused in both processes."""
    folders = []
    for number in (0, 1):
        shutil.copytree(model, tmp_path / str(number) / "model")
        folders.append(tmp_path / str(number))
    port = free_port()
    tensors = load_file(folders[1] / "model" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    bits = tensors[name].reshape(-1).view(np.uint8)
    bits[bits.size // 2] ^= 1
    save_file(tensors, folders[1] / "model" / "model.safetensors", {"format": "pt"})
    command = generate(Path("model"), "-n", "4")
    both = [start(port, 2, number, *command, cwd=folder) for number, folder in enumerate(folders)]
    for process in both:
        assert_refused(
            process, "the weights layers.1.mlp.up_proj.weight in process 1 differ from those"
        )


@pytest.mark.full
def test_generate_refuses_different_prompts_across_processes(start: Start, model: Path) -> None:
    port = free_port()
    command = "generate", str(model), *MESH, "-p"
    both = [start(port, 2, n, *command, text) for n, text in enumerate(("One", "Two"))]
    for process in both:
        assert_refused(process, "command: ", "One in process 0", "Two in process 1")


@pytest.mark.full
def test_mesh_must_use_every_device(start: Start, model: Path) -> None:
    """A mesh of 4 devices is refused in both processes if they have 2 devices together."""
    command = "generate", str(model), "--mesh", "data=4", "-p", PROMPT
    for process in start_both(start, *command):
        assert_refused(process, "data=4", "4 devices", "2 processes have 2")


@pytest.mark.full
@pytest.mark.parametrize("numbers", [(1,), (0,), (0, 1, 1)], ids=["alone", "first", "twice"])
def test_incomplete_group_is_refused_within_one_minute(
    start: Start, model: Path, numbers: tuple[int, ...]
) -> None:
    """A group with missing or duplicate process indices ends with a one-line error
    within a minute.
    """
    port = free_port()
    for process in [start(port, 3, number, *generate(model)) for number in numbers]:
        assert_refused(process, "the group of 3 processes")
