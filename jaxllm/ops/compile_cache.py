"""Persistent cache of compiled programs, which skips tracing and lowering too.

A `CachedJit` is `jax.jit` until `set_folder` sets a folder. It then looks there for a program that
an earlier process compiled from the same code, for the same configuration, formats and shapes, with
the same versions, kernels and settings (JAX's as of the first call), and saves what it compiles.
Programs are machine code, so a folder belongs to one processor type and one user
(`enable_compile_cache`).
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.core import get_opaque_trace_state

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files import atomic_file
from jaxllm.files.program_folder import CACHE_ENV, find_folder_problem, locate_program_folder
from jaxllm.files.versions import PROGRAM
from jaxllm.ops import native
from jaxllm.ops.target import Program

MAX_BYTES = 512 << 20  # total size; the least recently used program is evicted first
SUFFIX = ".program"
VALUE_SUFFIX = ".forms"
FIRST_PROGRAMS = 8  # at most as many are loaded ahead
_COMPILE_EVENTS = frozenset(  # JAX's duration events
    f"/jax/core/compile/{name}_duration"
    for name in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)
_PLAIN_TYPES = (str, int, float, bool, bytes, type(None), np.dtype, np.generic)

_NO_TRACE = get_opaque_trace_state(convention="flax")  # outside of any jit
_workers = ThreadPoolExecutor(2, "compile")
_folder: Path | None = None
_pending: dict[str, Future[Any]] = {}  # programs that are being loaded or compiled, by key
_first_keys: tuple[Path, list[str], list[str]] | None = None  # file, its keys, this process's
_hits = 0  # hits of JAX's own cache, whose programs cannot be serialized again


def enable_compile_cache(folder: str | Path | None = None) -> Path | None:
    """Save compiled programs in a folder and load them from there; return the folder.

    folder: by default JAXLLM_COMPILE_CACHE (0: no cache), else `jaxllm` in the user's cache
    directory. Each processor type has a subfolder, which no other user may write to and which holds
    no other user's files. Returns None, changing nothing, if JAX's cache folder was already set in
    another way or if the default folder cannot be used.

    Raises ConfigError if `folder` is given and cannot be used.
    """
    named = os.environ.get(CACHE_ENV, "")
    elsewhere = jax.config.values["jax_compilation_cache_dir"] not in (None, "", str(_folder))
    if elsewhere or (folder is None and named == "0"):
        return None
    where = locate_program_folder(folder)
    if problem := find_folder_problem(where):
        if folder is not None:
            raise ConfigError(
                f"compiled programs cannot be saved in {where}: {problem}. Give a folder that only"
                " this user may write to"
            )
        return None
    if where != _folder:
        set_folder(where)
        jax.config.update("jax_compilation_cache_dir", str(where))
        jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        compilation_cache.reset_cache()  # JAX reads its folder setting once
    return where


def has_compile_cache() -> bool:
    """Return whether compiled programs are saved, here or in JAX's own cache."""
    return _folder is not None or bool(jax.config.values["jax_compilation_cache_dir"])


@contextlib.contextmanager
def time_compiling() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds that the block has spent on compiling so far.

    Tracing and lowering count too. Time in which several threads compile counts once.
    """
    spans: list[tuple[float, float]] = []

    def listen(event: str, duration_secs: float, **about: Any) -> None:
        if event in _COMPILE_EVENTS:
            end = time.perf_counter()
            spans.append((end - duration_secs, end))

    def total() -> float:
        passed, last = 0.0, -math.inf
        for start, stop in sorted(spans):
            passed += max(0.0, stop - max(start, last))
            last = max(last, stop)
        return passed

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield total
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def set_folder(folder: Path | None) -> None:
    """Set the folder to load programs from and save them in; None disables the cache."""
    global _folder, _first_keys
    if _folder is None:
        jax.monitoring.register_event_listener(_count_hits)
    _folder, _first_keys = folder, None
    _pending.clear()


def _count_hits(event: str, **about: Any) -> None:
    global _hits
    _hits += event == "/jax/compilation_cache/cache_hits"


def load_or_make(facts: Any, make: Callable[[], Any]) -> Any:
    """Return `make()`, or the result that an earlier process saved in the folder.

    facts: everything that the result depends on, besides the code and its versions.
    """
    if _folder is None or not _has_full_repr(facts):
        return make()
    file = _folder / f"{_key(make.__qualname__, facts)}{VALUE_SUFFIX}"
    if (payload := _read_payload(file)) is not None:
        return pickle.loads(payload)
    value = make()
    _save_payload(file, pickle.dumps(value))
    return value


def remember(fact: Any) -> None:
    """Save that `fact` holds, for `is_known` in later processes with the same code."""
    load_or_make(fact, _nothing)


def is_known(fact: Any) -> bool:
    """Return whether a process has saved with `remember` that `fact` holds."""
    if _folder is None or not _has_full_repr(fact):
        return False
    return _read_payload(_folder / f"{_key(_nothing.__qualname__, fact)}{VALUE_SUFFIX}") is not None


def _nothing() -> None: ...


def load_first_programs(fact: Any) -> None:
    """Load, in other threads, the programs that the last process with this fact used first.

    Does nothing if the last call had the same fact.

    fact: as for `load_or_make`; what such processes have in common.
    """
    global _first_keys
    if _folder is None or not _has_full_repr(fact):
        return
    file = _folder / f"{_key(load_first_programs.__qualname__, fact)}{VALUE_SUFFIX}"
    if _first_keys is not None and _first_keys[0] == file:
        return
    payload = _read_payload(file)
    keys = pickle.loads(payload) if payload else []
    _first_keys = file, keys, []
    for key in keys:
        _pending[key] = _workers.submit(_load_ahead, _folder / f"{key}{SUFFIX}")


def _load_ahead(file: Path) -> Any:
    return _load_program(file) if _is_single_cpu() else None


def _note_first_program(key: str) -> None:
    """Remember the programs that this process uses first, for `load_first_programs`."""
    if _first_keys is None:
        return
    file, keys, used = _first_keys
    if key in used or len(used) == FIRST_PROGRAMS:
        return
    used.append(key)
    if key not in keys:
        keys[:] = used
        _save_payload(file, pickle.dumps(keys))


class CachedJit:
    """`jax.jit(function)` with positional arguments, whose programs can be saved.

    static, donated: argument numbers, as for `jax.jit`. Programs with static arguments that jaxllm
    does not define are not saved, because a caller's class or function is not identified by a name.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static_argnums: Sequence[int] = (),
        donate_argnums: Any = (),
    ) -> None:
        self._function, self._static = function, frozenset(static_argnums)
        self._options: Any = {
            "static_argnums": tuple(static_argnums),
            "donate_argnums": donate_argnums,
        }
        self._jit = Program(function, **self._options)
        self._loaded: dict[Hashable, list[Any]] = {}

    def __call__(self, *args: Any) -> Any:
        if _folder is None or get_opaque_trace_state(convention="flax") != _NO_TRACE:
            return self._jit.choose(args)(*args)
        constant, traced = self._split(args)
        known = self._loaded.setdefault((constant, _native_settings()), [])
        for compiled in known:
            try:
                return compiled(*traced)
            except TypeError:  # other shapes; nothing has run
                continue
        if (key := self._find_key(constant, traced)) is None:
            return self._jit(*args)
        compiled = self._start(_folder, key, args).result()
        _pending.pop(key, None)
        if compiled is None:  # the saved program is damaged
            compiled = _compile(_folder, key, self._lower(key, args))
        known.append(compiled)
        return compiled(*traced)

    def lower(self, *args: Any) -> Any:
        """Return the lowered program for such arguments, or their shapes."""
        return self._jit.lower(*args)

    def prepare(self, *args: Any) -> None:
        """Load or compile in another thread, for a later call, the program for such arguments.

        Tracing happens here, compiling while the caller goes on. Nothing happens without a folder,
        for programs that cannot be saved, and once the function ran with these static arguments.

        Args:
            args: arguments of the call, or `jax.ShapeDtypeStruct` in place of arrays.
        """
        if _folder is None or get_opaque_trace_state(convention="flax") != _NO_TRACE:
            return
        constant, traced = self._split(args)
        if (constant, _native_settings()) in self._loaded:
            return
        if (key := self._find_key(constant, traced)) is not None:
            self._start(_folder, key, args)

    def _start(self, folder: Path, key: str, args: Any) -> Future[Any]:
        """Return the program with this key: being loaded, or compiled from these arguments.

        The result is None if the saved program is damaged.
        """
        _note_first_program(key)
        if key not in _pending:
            file = folder / f"{key}{SUFFIX}"
            job = partial(_load_program, file)
            if not file.exists():
                job = partial(_compile, folder, key, self._lower(key, args))
            _pending[key] = _workers.submit(job)
        return _pending[key]

    def _split(self, args: Any) -> tuple[tuple[Any, ...], list[Any]]:
        """Return the static and the other arguments."""
        constant = tuple(args[i] for i in sorted(self._static))
        return constant, [x for i, x in enumerate(args) if i not in self._static]

    def _find_key(self, constant: Any, traced: Any) -> str | None:
        """Return the key of the program for these arguments; None if it cannot be saved."""
        leaves, structure = jax.tree.flatten(traced)
        if (
            not all(map(_has_full_repr, (constant, *_static_data(structure))))
            or not _is_single_cpu()
        ):
            return None
        forms = [jax.typeof(x) for x in leaves]
        function, options = self._function, sorted(self._options.items())
        return _key(function.__module__, function.__qualname__, options, constant, structure, forms)

    def _lower(self, key: str, args: Any) -> Any:
        # A unique name, or JAX's cache could return a program of earlier code.
        return jax.jit(_rename_function(self._function, key), **self._options).lower(*args)


def _compile(folder: Path, key: str, lowered: Any) -> Any:
    """Compile a program and save it."""
    before = _hits
    compiled = lowered.compile()
    if _hits == before:
        _save_program(folder / f"{key}{SUFFIX}", compiled)
    return_freed_memory()
    return compiled


def return_freed_memory() -> None:
    """Give back what compiling or loading a program leaves with the allocator: up to 0.1 GB."""
    with contextlib.suppress(AttributeError, OSError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)


def _key(*what: Any) -> str:
    return hashlib.sha256(repr((*what, _native_settings(), _code_versions())).encode()).hexdigest()


def _rename_function(function: Callable[..., Any], key: str) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        return function(*args)

    wrapper.__name__ = f"{function.__name__}_{key[:16]}"
    return wrapper


def _has_full_repr(value: Any) -> bool:
    """Return whether `repr` identifies a value: plain values, and jaxllm's dataclasses of them."""
    if isinstance(value, _PLAIN_TYPES):
        return True
    if isinstance(value, tuple | list | frozenset):
        return all(map(_has_full_repr, value))
    if isinstance(value, dict):
        return all(_has_full_repr(x) for pair in value.items() for x in pair)
    if isinstance(value, type):
        return value.__module__.startswith(("jaxllm.", "builtins", "numpy", "jax.", "ml_dtypes"))
    if not type(value).__module__.startswith("jaxllm.") or not dataclasses.is_dataclass(value):
        return False
    hidden = ("parent", "name") if isinstance(value, nn.Module) else ()
    fields = (f.name for f in dataclasses.fields(value) if f.name not in hidden)
    return all(_has_full_repr(getattr(value, name)) for name in fields)


def _static_data(structure: Any) -> list[Any]:
    """Return the node types and auxiliary data of a pytree structure."""
    node = structure.node_data()
    data = [] if node is None else list(node)
    for child in structure.children():
        data += _static_data(child)
    return data


def _is_single_cpu() -> bool:
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def _native_settings() -> Hashable:
    """Return the kernel settings that a compiled function depends on."""
    return native.is_enabled(), native.isa() if native.is_enabled() else None


@cache
def _code_versions() -> str:
    """Identify the code: our files, versions of Python and JAX, JAX's settings, and threads."""
    root = Path(__file__).parents[1]
    files = [*sorted(root.rglob("*.py")), Path(native.PATHS)]
    files += [Path(library)] if (library := native.library_path()) else []
    stamps = [(str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in files]
    settings = sorted(repr(pair) for pair in jax.config.values.items() if "cache" not in pair[0])
    versions = sys.version, jax.__version__, jax.lib.__version__, version("flax")
    xla_flags = os.environ.get("XLA_FLAGS", "")
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return repr((stamps, versions, settings, threads, xla_flags))


def _load_program(file: Path) -> Any:
    """Load a saved program; None if it is missing or damaged."""
    if (payload := _read_payload(file)) is None:
        return None
    try:
        return serialize_executable.deserialize_and_load(*pickle.loads(payload))
    except (ValueError, RuntimeError, pickle.UnpicklingError):
        return None
    finally:
        return_freed_memory()


def _read_payload(file: Path) -> bytes | None:
    """Read what `_save_payload` wrote; None if it is missing, damaged or of another version."""
    try:
        first_line, _, payload = file.read_bytes().partition(b"\n")
        if first_line != _first_line(payload):
            return None
        os.utime(file)
    except OSError:
        return None
    return payload


def _save_program(file: Path, compiled: Any) -> None:
    """Save a program if the disk has room, evicting the least recently used ones.

    One that calls Python cannot be saved (masks of grammars, without kernels).
    """
    try:
        payload = pickle.dumps(serialize_executable.serialize(compiled))
    except (AttributeError, TypeError, pickle.PicklingError):
        return
    _save_payload(file, payload)


def _first_line(payload: bytes) -> bytes:
    """Return the format, its version and the hash of the rest of the file."""
    mark = PROGRAM.text_mark
    return " ".join([*mark.values(), hashlib.sha256(payload).hexdigest()]).encode()


def _save_payload(file: Path, payload: bytes) -> None:
    try:
        with atomic_file(file) as out:
            out.write(_first_line(payload) + b"\n" + payload)
        cached = (f for suffix in (SUFFIX, VALUE_SUFFIX) for f in file.parent.glob(f"*{suffix}"))
        programs = sorted(cached, key=lambda f: f.stat().st_mtime)
        total = sum(f.stat().st_size for f in programs)
        while total > MAX_BYTES and len(programs) > 1:
            total -= programs[0].stat().st_size
            programs.pop(0).unlink()
    except (OSError, CheckpointError):
        return
