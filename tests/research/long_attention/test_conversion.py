"""Infini-attention: the conversion command, training, and the learning rate of the gates."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxllm
from jaxllm.errors import ConfigError
from jaxllm.train.optimizer import Optimizer
from jaxllm.weights.paths import flatten
from tests.train.test_command import STORY


def test_optimizer_rates_equal_torch_parameter_groups() -> None:
    """A parameter group with its own learning rate equals AdamW in torch and has no weight decay,
    even for a matrix.
    """
    rng = np.random.default_rng(0)
    names = ("w", "a.gate", "b.gate")
    start = {name: rng.standard_normal((2, 3)).astype(np.float32) for name in names}
    optimizer = Optimizer(
        steps=3, lr=1e-3, weight_decay=0.5, schedule="constant", warmup=0.0, max_grad_norm=None,
        rates=((r".*\.gate", 0.02),),
    ).build()  # fmt: skip
    ours: Any = jax.tree.map(jnp.asarray, start)
    theirs = {name: torch.tensor(x.copy(), requires_grad=True) for name, x in start.items()}
    groups = [
        {"params": [theirs["w"]], "lr": 1e-3, "weight_decay": 0.5},
        {"params": [theirs["a.gate"], theirs["b.gate"]], "lr": 0.02, "weight_decay": 0.0},
    ]
    adamw, state = torch.optim.AdamW(groups), optimizer.init(ours)
    for _ in range(3):
        gradient = {name: rng.standard_normal((2, 3)).astype(np.float32) for name in names}
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(jax.tree.map(jnp.asarray, gradient), state, ours)
        ours = jax.tree.map(jnp.add, ours, updates)
        for name, x in gradient.items():
            theirs[name].grad = torch.tensor(x)
        adamw.step()
    for name in names:
        np.testing.assert_allclose(ours[name], theirs[name].detach().numpy(), atol=1e-6)
    with pytest.raises(ConfigError, match=r"rates.* must be a number >= 0\.0"):
        Optimizer(steps=1, rates=(("gate", -1.0),))


@pytest.mark.usefixtures("demo_names")
def test_infini_command_and_training_of_memory_gates(run: Any, tmp_path: Path) -> None:
    """jaxllm infini converts a model, and train full with --no-pack moves the gates at their own
    rate of 0.01 and all else at --lr.
    """
    base, tuned, text = (tmp_path / name for name in ("made", "tuned", "story.jsonl"))
    lines = [json.dumps({"text": f"{number}. {STORY}"[: 30 + number]}) for number in range(8)]
    text.write_text("\n".join(lines), encoding="utf-8")
    infini_args = ("infini", "demo:llama", base, "--segment", 4, "--update", "delta_once")
    status, _, err = run(*infini_args[:-1], "dalta")
    assert (status, "update must be one of linear, delta, delta_once" in err) == (1, True), err
    status, _, err = run(*infini_args)
    assert (status, "segments of 4 tokens" in err) == (0, True), err
    arguments = ("train", "full", base, tuned, "--data", text, "--length", 40, "--batch-size", 2,
                 "--steps", 1, "--eval-split", 0)  # fmt: skip
    status, _, err = run(*arguments)
    assert (status, "--no-pack" in err) == (1, True), err
    status, _, err = run(*arguments, "--no-pack", "--lr", 1e-4, "--warmup", 0)
    assert status == 0, err
    before, after = (dict(flatten(jaxllm.load(path).params)) for path in (base, tuned))
    for path, x in before.items():
        most = float(np.abs(np.asarray(after[path], np.float32) - np.asarray(x, np.float32)).max())
        if path.endswith("memory_gate"):
            assert (np.asarray(x, np.float32) == -4).all()
            # The first step of Adam has the size of the rate.
            assert most == pytest.approx(0.01, rel=0.02)
        else:
            assert 0 < most < 3e-4, path
