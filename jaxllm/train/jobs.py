"""Training jobs: each kind of training makes a `Job` of a model, which one loop runs.

This module has full fine-tuning and LoRA; `fake.job`, `distill.job` and `prompts` have the others.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import flax.linen as nn
import jax

from jaxllm.adapters import (
    Adapter,
    LoraConfig,
    around,
    attached,
    fresh,
    taken,
    with_config,
    write_adapter,
)
from jaxllm.api import LM
from jaxllm.compress.journal import Journal
from jaxllm.distributed import agree
from jaxllm.train.constraints import KeepZeros, keep_zeros
from jaxllm.train.data.rows import Data
from jaxllm.train.loop import Plan, Prepare, Report, Run, Say, train
from jaxllm.train.objective import NextToken, Objective
from jaxllm.train.step import Constraint, Setup, Transformation
from jaxllm.train.trained import ALL, Rules, trainable
from jaxllm.weights.leaves.adapted import Adapted
from jaxllm.weights.paths import Params, Placed, map_leaves, of_one_device
from jaxllm.weights.precision import cast
from jaxllm.whole import check_seed, dtype_name

V = TypeVar("V")
_ADAPTERS: Rules = ((r".*\.weight\.(a|b|magnitude)", True),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A training job.

    Attributes:
      lm, params: the model, and its parameters at the start.
      like: the parameters in the compute dtype, if it differs; master weights are float32 anyway.
      rules: which parameters are trained.
      given: further arrays for the objective.
      finish: writes the result into a directory.
      data, held_out: replace those of `run`, if a teacher's outputs were added to them.
    """

    lm: LM
    params: Params
    objective: Objective
    finish: Callable[[Params, Path], None]
    like: Params | None = None
    rules: Rules = ALL
    given: Any = None
    constraint: Constraint | None = None
    prepare: Prepare | None = None
    data: Data | None = None
    held_out: Data | None = None

    @property
    def model(self) -> nn.Module:
        return self.lm.model


def full(
    lm: LM,
    dtype: str = "float32",
    *,
    rules: Rules = ALL,
    objective: Objective | None = None,
    constraint: Constraint | None = None,
) -> Job:
    """Train all weights, or those that `rules` select.

    Args:
      lm: in float32, since the master weights start as its parameters.
      dtype: of computation and of the result.
    """
    dtype = dtype_name("dtype", dtype)
    precision = dataclasses.replace(lm.model.precision, quantize=None).in_dtype(dtype)
    ran = dataclasses.replace(lm, model=lm.model.clone(precision=precision))

    def finish(params: Params, directory: Path) -> None:
        dataclasses.replace(ran, params=params).save(directory)

    return Job(
        lm=ran,
        params=lm.params,
        like=None if dtype == "float32" else cast(lm.params, precision),
        objective=objective or NextToken(),
        rules=rules,
        constraint=constraint,
        finish=finish,
    )


def lora(lm: LM, config: LoraConfig, *, seed: int = 0, start: Adapter | None = None) -> Job:
    """Train an adapter; the weights, in any format, are frozen. The result is a PEFT directory.

    Args:
      seed: of the initialization.
      start: an adapter of this configuration to continue from.

    Raises ConfigError for target modules that the model does not have, and for a `start` with other
    modules, ranks or scales.
    """
    key = jax.random.key(check_seed(seed))
    if start is None:
        adapter = fresh(lm.config, lm.params, config, key)
    else:
        adapter = with_config(lm.config, start, config)
    if isinstance(lm.model, Placed):
        attachment = lm.model.beside(lm.params, around(lm.config, adapter))
    else:
        attachment = attached(lm.config, lm.params, adapter)

    def finish(params: Params, directory: Path) -> None:
        beside = map_leaves(lambda _, leaf: _adapters_of(leaf), params)
        found = taken(lm.config, of_one_device(lm.model, beside), config)
        write_adapter(directory, found, lm.config, base=str(lm.path))

    return Job(
        lm=lm,
        params=attachment,
        objective=NextToken(),
        rules=_ADAPTERS,
        finish=finish,
    )


def _adapters_of(leaf: Any) -> Any:
    """Return the adapters of a weight, without the weight."""
    return leaf.replace(weight=_adapters_of(leaf.weight)) if isinstance(leaf, Adapted) else None


def zeros_of(lm: LM, rules: Rules = ALL) -> KeepZeros:
    """Return the constraint that keeps the zeros of a pruned model's matrices.

    Raises ConfigError if no matrix has enough zeros.
    """
    return keep_zeros(trainable(lm.params), rules)


def run(
    job: Job,
    data: Data,
    optimizer: Transformation,
    plan: Plan,
    *,
    held_out: Data | None = None,
    directory: Path | None = None,
    remat: bool = False,
    report: Report = lambda *_: None,
    checkpoint: Callable[[Params, int], None] = lambda *_: None,
    sample: Callable[[Params], str] | None = None,
    show_progress: bool | None = None,
    say: Say = lambda _: None,
) -> Run:
    """Run a job. The other arguments and the errors are those of `loop.train`.

    Args:
      directory: where the state is saved, to resume from. The caller removes it (`forget`) after
        writing the result.
      remat: recompute the inside of each block in the backward pass (gradient checkpointing).
    """
    model = in_training(job.model).clone(remat=remat)
    setup = Setup(model, job.objective, optimizer, job.constraint)
    data, held_out = job.data or data, job.held_out or held_out
    digests = [None if some is None else some.digest for some in (data, held_out)]
    agree({"data": digests})
    return train(
        job.params,
        data,
        setup,
        plan,
        rules=job.rules,
        like=job.like,
        given=job.given,
        held_out=held_out,
        prepare=job.prepare,
        directory=directory,
        report=report,
        checkpoint=checkpoint,
        sample=sample,
        show_progress=show_progress,
        say=say,
    )


def in_training(model: nn.Module) -> nn.Module:
    """Return the model; on a mesh its outputs stay sharded, since the host does not read them."""
    return model.clone(apart=True) if isinstance(model, Placed) else model


def shared(model: nn.Module, params: Params) -> Params:
    """Shard single-device parameters if `model` is on a mesh."""
    return model.shared(params) if isinstance(model, Placed) else params


def everywhere(model: nn.Module, tree: V) -> V:
    """Replicate arrays that are not the model's parameters over its mesh, if it is on one."""
    return model.everywhere(tree) if isinstance(model, Placed) else tree


def alone(lm: LM) -> LM:
    """Return the model for one device, with its parameters gathered on the host of each process."""
    if not isinstance(lm.model, Placed):
        return lm
    return dataclasses.replace(lm, model=lm.model.plain(), params=lm.model.whole(lm.params))


def spread_as(lm: LM, other: LM) -> LM:
    """Shard a single-device model like another model, if that is on a mesh."""
    if not isinstance(other.model, Placed):
        return lm
    model = other.model.like(lm.config).clone(precision=lm.model.precision)
    return dataclasses.replace(lm, model=model, params=model.shared(lm.params))


def forget(directory: Path) -> None:
    """Remove the saved state of a run, after its result is written."""
    journal = Journal(directory)
    with journal.kept():
        journal.forget()


def told(lm: LM, prompt: str, tokens: int = 40) -> Callable[[Params], str]:
    """Return a function from parameters to a greedy continuation of a prompt, as one line."""

    def sample(params: Params) -> str:
        found = dataclasses.replace(lm, params=params).generate(prompt, max_new_tokens=tokens)
        return f"  {prompt}{found.text}".replace("\n", " ")

    return sample
