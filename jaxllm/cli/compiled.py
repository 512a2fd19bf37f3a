"""Compiled programs that outlive the process: the second run of a command starts sooner."""

import hashlib
import os
import platform
import stat
from pathlib import Path

VARIABLE = "JAXLLM_COMPILE_CACHE"


def keep_compiled() -> None:
    """Let JAX keep what it compiles in a folder of this user, and look there first.

    JAXLLM_COMPILE_CACHE names the folder, 0 means none; by default it is `jaxllm` among the user's
    caches. A folder that JAX has been given in another way stays. Programs hold machine code, so
    each kind of processor has a folder of its own, which nobody else may write to, and in which
    nobody else has left anything: otherwise nothing is kept.
    """
    import jax

    from jaxllm.programs import MOST_BYTES, keep

    named = os.environ.get(VARIABLE, "")
    if named == "0" or jax.config.values["jax_compilation_cache_dir"]:
        return
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = (Path(named) if named else caches / "jaxllm") / f"compiled-{_processor()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _nobody_elses(folder) or not os.access(folder, os.W_OK):
            return
    except OSError:  # a machine without a home is as good
        return
    keep(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _nobody_elses(folder: Path) -> bool:
    """Whether a folder and the files in it are this user's, and only this user may write there."""
    found, files = folder.stat(), [f.stat(follow_symlinks=False) for f in os.scandir(folder)]
    private = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return private and all(f.st_uid == found.st_uid and stat.S_ISREG(f.st_mode) for f in files)


def _processor() -> str:
    """A name for what machine code depends on: the processor and what it can do."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        kinds = ("model name", "flags", "Features", "CPU ")
        lines = info.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        flags = "".join(line for line in lines if line.startswith(kinds))
    else:
        flags = platform.processor()
    return hashlib.sha256((platform.machine() + flags).encode()).hexdigest()[:12]
