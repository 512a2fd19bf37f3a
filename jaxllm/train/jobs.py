"""A training as a value: of a model each kind makes a `Job`, which the one loop runs.

All weights and adapters are here; `fake.job`, `distill.job` and `prompts` have the other kinds.
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
    """A training to be run.

    lm: what is trained, `params` as they start. like: the same in the formats that the model runs
    in, where these are others; what is trained is kept in float32 all the same. rules: what is
    trained. given: arrays for the objective. finish: writes what came of it into a directory. data,
    held_out: in place of those that it is run on, where a teacher has said more of them.
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
    """All weights, or those that `rules` name. dtype: what the model runs in and is written in.

    lm: in float32, since what is trained begins from these numbers.
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
    """An adapter beside the weights, which stay as they are, in any format. The result is PEFT's
    directory.

    seed: of what is drawn. start: an adapter of this configuration to begin with, in place of a
    new one. Raises ConfigError for targets that are not there, and for a start of other modules,
    ranks or scales.
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
    """What stands beside a weight, without it."""
    return leaf.replace(weight=_adapters_of(leaf.weight)) if isinstance(leaf, Adapted) else None


def zeros_of(lm: LM, rules: Rules = ALL) -> KeepZeros:
    """The constraint that what is zero in a pruned model's matrices stays zero.

    Raises ConfigError where none of them has zeros.
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
    """Run a job. directory: where its state is kept, from which an interrupted one goes on; the
    caller removes it (`forget`) when the result is written. remat: keep no block's inside for its
    gradient. The others as `loop.train` takes them, and what it raises.
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
    """A model of which, on a mesh, nobody reads on the host what comes out."""
    return model.clone(apart=True) if isinstance(model, Placed) else model


def shared(model: nn.Module, params: Params) -> Params:
    """Parameters of a model of one device as `model` takes them."""
    return model.shared(params) if isinstance(model, Placed) else params


def everywhere(model: nn.Module, tree: V) -> V:
    """What is trained beside a model's own parameters, where the model runs."""
    return model.everywhere(tree) if isinstance(model, Placed) else tree


def alone(lm: LM) -> LM:
    """A model on one device, whatever it was on: its parameters whole, on the host; of several
    processes on the host of each.
    """
    if not isinstance(lm.model, Placed):
        return lm
    return dataclasses.replace(lm, model=lm.model.plain(), params=lm.model.whole(lm.params))


def spread_as(lm: LM, other: LM) -> LM:
    """A model of one device on the mesh of another model, if that is on one."""
    if not isinstance(other.model, Placed):
        return lm
    model = other.model.like(lm.config).clone(precision=lm.model.precision)
    return dataclasses.replace(lm, model=model, params=model.shared(lm.params))


def forget(directory: Path) -> None:
    """Remove the state that a run has kept there: its result is written."""
    journal = Journal(directory)
    with journal.kept():
        journal.forget()


def told(lm: LM, prompt: str, tokens: int = 40) -> Callable[[Params], str]:
    """What a model says after a prompt, greedily: a line for people."""

    def sample(params: Params) -> str:
        found = dataclasses.replace(lm, params=params).generate(prompt, max_new_tokens=tokens)
        return f"  {prompt}{found.text}".replace("\n", " ")

    return sample
