"""The `jaxllm plan` command: figures, mesh tables and refused options."""

import json
import shutil
from pathlib import Path

import pytest

from jaxllm import models
from jaxllm.checkpoints.resolve import DEMO_DIR
from jaxllm.research.plan.command import open_for_planning
from scripts.benchmarks.cluster_table import SHAPE
from tests.conftest import Run, assert_refused, succeed

NUMBERS = "flops=1t,memory=16g,bandwidth=20g,link=10g,latency=0"


def test_plan_bytes_equal_demo_checkpoint(run: Run) -> None:
    """Planned weight bytes equal the checkpoint's, and a token takes the time to read weights and
    cache once.
    """
    status, out, _ = run("plan", "demo:llama", "--json", "--hardware", NUMBERS)
    plan = json.loads(out)
    assert status == 0
    assert (plan["mesh"], plan["decode"], plan["idle"]) == ("tensor=1", [], 0.0)
    size = sum(t.nbytes for t in open_for_planning("demo:llama").tensors.values())
    assert plan["weights_bytes"] == size
    # One row on one device: a token reads all weights and the cache from memory once.
    assert plan["token_seconds"] == pytest.approx((size + plan["cache_bytes"]) / 20e9, rel=0.01)
    assert plan["total_bytes"] == sum(plan[f"{x}_bytes"] for x in ("weights", "cache", "working"))


def test_plan_accepts_config_file(run: Run, tmp_path: Path) -> None:
    """A config.json suffices: Llama 3 70B has 70,553,706,496 parameters (its model card rounds to
    70.6 B).
    """
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    path = str(tmp_path / "config.json")
    options = ("--mesh", "tensor=8", "--batch", "16", "--context", "8192", "--json")
    plan = json.loads(run("plan", path, *options)[1])
    norms = (2 * 80 + 1) * 8192  # replicated on every device
    assert plan["weights_bytes"] == 2 * ((70_553_706_496 - norms) // 8 + norms)
    assert plan["cache_bytes"] == 16 * 8192 * (80 * 2 * 1 * 128 * 2 + 9)  # one kv head per device
    sums = [c for c in plan["decode"] if c["what"] in ("attention", "MLP")]
    assert [(c["kind"], c["count"], c["bytes"]) for c in sums] == [
        ("all-reduce", 80, 16 * 8192 * 4)
    ] * 2
    assert sums[0]["sent"] == 80 * 2 * 7 / 8 * 16 * 8192 * 4
    config = open_for_planning(Path(path)).config
    assert models.FAMILIES[config.model_type].config is type(config)


def test_plan_prints_mesh_table(run: Run) -> None:
    """With --devices, a table lists the candidate meshes, followed by the communication of a
    decoding step.
    """
    _, out, _ = run("plan", "--devices", "4", "--batch", "8", "--goal", "throughput")
    head, *rows = out.split("\n\n")[0].splitlines()
    assert head.split()[0] == "mesh"
    assert {row.split()[0] for row in rows} >= {"data=4", "data=2,tensor=2", "stage=4"}
    assert "communication of a decoding step" in out


def test_plan_ranks_meshes_by_throughput(run: Run) -> None:
    """--goal throughput sorts the meshes that fit by tokens per second of the requested batch,
    highest first.
    """
    options = ("--devices", 8, "--batch-size", 32, "--hardware", "rtx4090", "--goal", "throughput")
    plans = json.loads(run("plan", "demo:gpt2", *options, "--json")[1])
    rates = [plan["tokens_per_second"] for plan in plans if plan["fits"]]
    assert len(rates) > 3
    assert rates == sorted(rates, reverse=True)


def test_plan_accepts_directory_with_only_config(run: Run, tmp_path: Path) -> None:
    """A directory with only config.json gives the plan of that file; options are checked before the
    model is opened.
    """
    shutil.copy(DEMO_DIR / "llama" / "config.json", tmp_path)
    options = ("--devices", 2, "--json")
    out, _ = succeed(run, "plan", tmp_path, *options)
    assert out == run("plan", tmp_path / "config.json", *options)[1]
    (tmp_path / "config.json").write_text("{}")
    for options, message in (
        (("--devices", 0), "--devices must"),
        (("--mesh", "tp=8"), "mesh must"),
    ):
        assert_refused(run, message, "plan", tmp_path, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mesh", "tensor=3"), "num_attention_heads 2 is not divisible by tensor=3"),
        (("--mesh", "pipe=2"), "mesh must look like data=2,tensor=4"),
        (("--mesh", "tensor=2", "--devices", "4"), "cannot be combined"),
        (("--devices", "4", "--goal", "speed"), "latency or throughput"),
        (("--hardware", "h900"), "is unknown: use a100"),
        (("--context", "0"), "--context must be 1 or more"),
        (("--batch", "0"), "--batch-size must be 1 or more"),
        (("--devices", "7"), "no mesh of 7 devices"),
    ],
)
def test_plan_refuses_invalid_options_in_one_line(
    run: Run, options: tuple[str, ...], message: str
) -> None:
    assert_refused(run, message, "plan", "demo:llama", *options)
