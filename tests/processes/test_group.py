"""Process groups: options, agreement checks, and the error for a failed group."""

import numpy as np
import pytest

from jaxllm.cli import COMMANDS, distributed, train
from jaxllm.errors import ConfigError
from jaxllm.runtime import multihost, supervisor
from jaxllm.runtime.multihost import Group, describe_differences, parse_group
from tests.conftest import Run, assert_refused

AT = "10.0.0.1:7070"


def test_parse_group_accepts_address_count_and_index() -> None:
    assert parse_group(AT, 2, 1) == Group(AT, 2, 1)
    assert parse_group("[::1]:7070", 1, 0) == Group("[::1]:7070", 1, 0)
    assert parse_group("auto", None, None) == Group("auto")


@pytest.mark.parametrize(
    ("address", "count", "number", "words"),
    [
        ("10.0.0.1", 2, 0, "HOST:PORT"),
        (":7070", 2, 0, "HOST:PORT"),
        ("10.0.0.1:0", 2, 0, "HOST:PORT"),
        ("10.0.0.1:65536", 2, 0, "HOST:PORT"),
        ("10.0.0.1:x", 2, 0, "HOST:PORT"),
        (AT, None, 0, "--processes"),
        (AT, 2, None, "--process"),
        (AT, 0, 0, "--processes must be from 1"),
        (AT, 1 << 30, 0, "--processes must be from 1"),
        (AT, 2, 2, "--process must be from 0 to 1 with --processes 2, got 2"),
        (AT, 2, -1, "--process must be from 0 to 1 with --processes 2, got -1"),
        ("auto", 2, None, "auto detects"),
    ],
)
def test_parse_group_refuses_invalid_groups(
    address: str, count: int | None, number: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_group(address, count, number)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--distributed", AT, "--processes", 2, "--process", 2, "generate"], "from 0 to 1"),
        (["--processes", 2, "generate"], "require --distributed"),
    ],
)
def test_cli_refuses_invalid_groups_in_one_line(
    run: Run, arguments: list[object], words: str
) -> None:
    assert_refused(run, words, *arguments)


def test_every_command_is_distributed_or_single_process() -> None:
    """Every command and training method is listed either as distributed or as single-process, never
    as both.
    """
    methods = [f"train {name}" for name in (f.__name__ for f in train.METHODS)]
    every = {*COMMANDS, *methods}
    assert set(distributed.COMMANDS) | set(distributed.SINGLE_PROCESS) == every
    assert not set(distributed.COMMANDS) & set(distributed.SINGLE_PROCESS)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("batch", "use --ray ADDRESS"),
        ("compress", "on one device"),
        ("convert", ""),
        ("info", "runs no model"),
        ("train rl", ""),
    ],
)
def test_single_process_command_is_refused_with_reason(run: Run, command: str, words: str) -> None:
    group = "--distributed", AT, "--processes", 2, "--process", 0
    for message in (words, f"--distributed does not support {command}, "):
        assert_refused(run, message, *group, *command.split(), "x")


@pytest.mark.parametrize("words", [["train", "distill"], ["recall"]])
def test_commands_of_other_packages_join_groups(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "run_supervised", lambda arguments, group: 7)
    assert distributed.enter_group(words[0], words, AT, 2, 0) == 7


def test_difference_is_named_with_its_process() -> None:
    """The differing value is named with its process, and long values are shown from where they
    differ.
    """
    long = "x" * 300
    first = {"jax": "0.10.2", "config": f"{long}a", "same": "1"}
    assert describe_differences([first, dict(first)]) == ""
    assert describe_differences([first, {**first, "jax": "0.10.1"}]) == (
        "jax: 0.10.2 in process 0, 0.10.1 in process 1"
    )
    found = describe_differences([first, first, {**first, "config": f"{long}b"}])
    assert found.startswith("config: ...") and found.endswith("xb in process 2")
    assert len(found) < 200
    assert describe_differences([{"a": "bc"}, {"a": "b"}]) == "a: bc in process 0, b in process 1"


def test_single_process_needs_no_communication() -> None:
    """In a single process, broadcasts and gathers return the local value and no agreement is
    checked.
    """
    assert not multihost.is_multiprocess()
    assert multihost.broadcast_from_zero(lambda: "value") == "value"
    done: list[str] = []
    multihost.run_on_process_zero(lambda: done.append("done"))
    assert done == ["done"]
    assert multihost.broadcast_arrays(lambda: {"x": np.ones(2)})["x"].tolist() == [1, 1]
    assert multihost.all_gather_objects([1, "a"]) == [[1, "a"]]
    multihost.check_processes_agree({"anything": object()})


JOIN = "RPC: /xla.coordination.CoordinationService/RegisterTask"  # as in jaxlib's messages


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("UNAVAILABLE: The following tasks are unhealthy\n1\n2\n", "another process of the group"),
        ("Gloo all-reduce failed: Connection closed by peer", "another process of the group"),
        (f"DEADLINE_EXCEEDED: Deadline Exceeded\n\n{JOIN}", "was not complete within"),
        (f"ALREADY_EXISTS: Aborted connect attempt\n\n{JOIN}", "two processes have --process 1"),
    ],
)
def test_explain_failure_returns_one_line(text: str, words: str) -> None:
    """The output of a failed JAX coordination service becomes one line that names the cause; in a
    group of two, also the other process.
    """
    message = supervisor.explain_failure(text, Group(AT, 3, 1))
    assert words in message and "\n" not in message
    for number in (0, 1):
        other = supervisor.explain_failure(text, Group(AT, 2, number))
        assert other.startswith(f"process {1 - number} of the group") or JOIN in text
