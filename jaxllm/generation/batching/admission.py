"""Requests on their way into a row: they are checked, and wait for slots and for programs."""

from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import NamedTuple

import jax
import numpy as np

from jaxllm.errors import SamplingError
from jaxllm.generation.batching.active import ActiveRequest, ServeState, add_sampler, fill_request
from jaxllm.generation.batching.prefix_store import PrefixStore
from jaxllm.generation.batching.programs import Family, Programs
from jaxllm.generation.batching.requests import Request, check_request
from jaxllm.generation.loops.finish import NO_TOKEN, pad_eos_ids
from jaxllm.generation.sampling.sampler import Sampler
from jaxllm.generation.sampling.stacked import RowSampler, fit_sampler
from jaxllm.models.interventions import Apply
from jaxllm.models.site_inputs import check_edits, check_read, stack_rows
from jaxllm.models.sites import WEIGHT_SITES, Edits, split_name
from jaxllm.runtime.validation import check_int_array
from jaxllm.weights.model import Model


class Arrival(NamedTuple):
    """A checked request without a row. The fields are those of `ActiveRequest`.

    sampler: as a row has it.
    """

    request: Request
    prompt_T: np.ndarray
    kind: Hashable
    sampler: RowSampler
    edits: Edits
    read: tuple[str, ...]
    read_steps: frozenset[int] | None


class Held(NamedTuple):
    """A request that waits for programs of these families."""

    arrival: Arrival
    families: list[Family]


def check_arrival(model: Model, request: Request, capacity: int) -> Arrival:
    """Return a checked request, or raise the JaxllmError that rejects it."""
    prompt_T = check_request(model, request, capacity)
    edits = check_edits(model, request.edits, 1, 1, None)
    if any(isinstance(edit, Apply) for edit in edits.edits):
        raise SamplingError("edits of a request cannot be functions: use Add, Set, Scale, ...")
    weights = [x for names in edits.sites for x in names if split_name(x)[1] in WEIGHT_SITES]
    if weights:  # every row would then run without the attention kernel, with other bits
        raise SamplingError(
            f"a request of serve cannot edit {weights[0]}, which would change the bits of other"
            " requests. Use generate"
        )
    why = "a request of serve cannot read {}. Use forward"
    read = check_read(model, request.read, WEIGHT_SITES, why)
    steps: frozenset[int] | None = None
    if request.read_steps is not None:
        given = check_int_array("read_steps", request.read_steps, SamplingError)
        steps = frozenset(given.ravel().tolist())
    kind, sampler = fit_sampler(request.sampler, model.config.vocab_size, capacity + 1)
    return Arrival(request, prompt_T, kind, sampler, edits, read, steps)


def release_held(
    came: deque[Arrival], held: list[Held], programs: Programs
) -> tuple[deque[Arrival], list[Held]]:
    """Split requests: to admit now, which includes held ones with their programs; still held."""
    released = deque(came)
    still = list[Held]()
    for one in held:
        if one.arrival.request.has_ended or not programs.find_missing(one.families):
            released.append(one.arrival)
        else:
            still.append(one)
    return released, still


def reserve_prompt(state: ServeState, arrival: Arrival, row: int) -> ServeState | None:
    """Return the state in which a row has slots for a prompt; None if there are too few."""
    if state.pages is None:
        return state
    new = arrival.request.max_new_tokens - 1  # the last token has no slot
    slots = arrival.prompt_T.size + min(new, 1)
    pages = state.pages.reserve(row, slots, spare=bool(state.active))
    return None if pages is None else state._replace(pages=pages)


def find_families(state: ServeState, arrival: Arrival) -> list[Family]:
    """Return the families of programs that run this request beside those of the state."""
    held = [(one.request, one.read) for one in (*state.active.values(), *state.paused.values())]
    return sorted(
        {
            Family(state.form, request.adapter is not None, names)
            for request, read in [*held, (arrival.request, arrival.read)]
            for names in {(), read}
        }
    )


def fit_form(state: ServeState, arrival: Arrival, row: int, programs: Programs) -> ServeState:
    """Return the state of the form that it has with this request in a row: with its kind of
    sampler, as many ids that end a text, and its edits.
    """
    state = add_sampler(state, arrival.kind, arrival.sampler)
    rows, eos_E = state.rows, pad_eos_ids(arrival.request.eos_token_ids)
    missing = eos_E.size - rows.eos_BE.shape[1]
    if missing > 0:
        eos_BE = np.pad(rows.eos_BE, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        rows = rows.replace(eos_BE=jax.device_put(eos_BE))
    held = {r: one.edits for r, one in {**state.active, **state.paused}.items()}
    held[row] = arrival.edits
    edited = {r: edits for r, edits in held.items() if edits.edits}
    edits = stack_rows(edited, state.cache.batch)
    return number_form(state._replace(rows=rows, edits=edits), programs)


def number_form(state: ServeState, programs: Programs) -> ServeState:
    """Return the state with the number of its form."""
    leaves, structure = jax.tree.flatten(state.edits)
    shapes = tuple((x.shape, x.dtype) for x in leaves)
    form = programs.number((state.kinds, state.rows.eos_BE.shape, structure, shapes))
    return state._replace(form=form)


def add_samplers(
    state: ServeState, samplers: Sequence[Sampler], model: Model, programs: Programs
) -> ServeState:
    """Return the state with these kinds of samplers, without those that are not for one row."""
    for sampler in samplers:
        with suppress(SamplingError):
            kind, fitted = fit_sampler(sampler, model.config.vocab_size, state.capacity + 1)
            state = add_sampler(state, kind, fitted)
    return number_form(state, programs)


def admit_request(
    state: ServeState, row: int, arrival: Arrival, number: int, store: PrefixStore
) -> ServeState:
    """Return the state in which a row runs this request, the `number`th."""
    request, prompt_T, kind, sampler, edits, read, steps = arrival
    prefix = store.find(request, prompt_T, edits)
    active = ActiveRequest(
        request, number, prompt_T, kind, prefix, prompt_T.size, prefix.num_run, edits, read, steps
    )
    return fill_request(state, row, active, sampler)
