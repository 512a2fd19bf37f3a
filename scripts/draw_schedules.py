"""Who does what at which tick: the schedules of pipelines as pictures, their idle shares on them.

Every cell is a job of the tables that training and decoding go by (`mesh/pipeline/schedule.py`).
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from jaxllm.cli import run_command
from jaxllm.cli.console import write
from jaxllm.mesh.pipeline.schedule import Job, Schedule, forward, gpipe, one_f_one_b

EXAMPLE = "Example: python scripts/draw_schedules.py --out docs/schedules.png"
AHEAD = ("#4878a8", "#86b0d6", "#b9d3ea", "#dde9f5")  # of the first chunk, the second, ...
BACK = ("#d1793b", "#e8a873", "#f3cdae", "#fae7d9")
IDLE = "#f4f4f4"


def schedules(stages: int, microbatches: int, chunks: int) -> dict[str, Schedule]:
    """What is drawn, by its title."""
    p, m, v = stages, microbatches, chunks
    return {
        "GPipe": gpipe(p, m),
        "1F1B": one_f_one_b(p, m),
        f"1F1B, interleaved: {v} chunks a stage": one_f_one_b(p, m, v),
        f"decoding: {p} groups of rows, {v + 1} tokens each": forward(p, p, v + 1),
    }


def colour(job: Job) -> str:
    """Of its cell."""
    shades = AHEAD if job.forward else BACK
    return shades[job.chunk % len(shades)]


def panel(plot: Any, title: str, schedule: Schedule, training: bool) -> str:
    """One schedule: a row for each stage, a column for each tick. Returns what it says."""
    size = 7 if schedule.microbatches < 100 else 4
    for tick, row in enumerate(schedule.ticks):
        for stage, job in enumerate(row):
            face = IDLE if job is None else colour(job)
            plot.add_patch(Rectangle((tick, stage), 1, 1, facecolor=face, edgecolor="white"))
            if job is not None:
                at = (tick + 0.5, stage + 0.5)
                plot.annotate(str(job.microbatch), at, ha="center", va="center", fontsize=size)
    said = (
        f"{schedule.idle_share:.1%} of all ticks idle ({schedule.overhead:.1%} of the ideal time)"
    )
    if training:
        held = max(map(schedule.in_flight, range(schedule.stages)))
        said += f"; a stage keeps at most {held} inputs for their gradients"
    plot.set_title(f"{title}: {said}", fontsize=8, loc="left")
    plot.set_ylim(schedule.stages, 0)
    plot.set_yticks([i + 0.5 for i in range(schedule.stages)], range(schedule.stages), fontsize=7)
    plot.set_ylabel("stage", fontsize=7)
    plot.xaxis.set_major_locator(MaxNLocator(integer=True))
    plot.tick_params(length=0, labelsize=7)
    plot.spines[:].set_visible(False)
    return f"{title}: {said}\n"


def draw(stages: int, microbatches: int, chunks: int, out: Path) -> None:
    """One picture of all, on one scale of jobs: a chunk's job takes a chunk's share of a tick."""
    found = schedules(stages, microbatches, chunks)
    figure = Figure(figsize=(11, 0.9 + 0.42 * stages * len(found)), layout="constrained")
    for plot, (title, schedule) in zip(figure.subplots(len(found)), found.items(), strict=True):
        write(panel(plot, title, schedule, training="decoding" not in title))
        # A job of one of v chunks is 1 / v of a stage's work, and is drawn so wide.
        longest = max(len(s.ticks) / s.chunks for t, s in found.items() if "decoding" not in t)
        width = 1 if "decoding" in title else schedule.chunks
        plot.set_xlim(0, longest * width)
    plot.set_xlabel("ticks, each of one job", fontsize=7)
    marks = [Patch(color=AHEAD[0]), Patch(color=BACK[0]), Patch(color=IDLE)]
    names = ["forward", "backward", "idle"]
    if chunks > 1:
        marks[1:1], names[1:1] = [Patch(color=AHEAD[1])], ["of the next chunk, or the next token"]
    figure.legend(marks, names, loc="outside lower center", ncols=len(marks), fontsize=7)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main(
    stages: Annotated[int, typer.Option(help="Stages of the pipeline.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Of a step of training.")] = 8,
    chunks: Annotated[int, typer.Option(help="Runs of layers that a stage has, interleaved.")] = 2,
    out: Annotated[Path, typer.Option(help="The PNG file.")] = Path("docs/schedules.png"),
) -> None:
    """Draw which stage does which microbatch at which tick. Numbers in cells are microbatches."""
    draw(stages, microbatches, chunks, out)


if __name__ == "__main__":
    run_command(main, "draw_schedules.py", EXAMPLE)
