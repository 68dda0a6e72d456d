"""A run as it goes: a live display on a terminal and in a notebook, one aligned line per step elsewhere.

Everything goes to stderr, so that stdout stays free for what machines read; in a notebook below the cell.
"""

from __future__ import annotations

import html
import itertools
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

from openrlhf.observability.loggers import score_names

if TYPE_CHECKING:
    from rich.console import RenderableType

    from openrlhf.observability.run_directory import NoteLog

REWARD = ("reward", "rollout/reward_mean", "score")
LENGTH = ("response_length", "rollout/response_length_mean")
LOSS = ("policy_loss", "loss", "gpt_loss")
ACCURACY = ("acc",)
TOKENS_PER_SECOND = ("perf/generated_tokens_per_second", "perf/tokens_per_second")
"""In RL the tokens that the policy wrote, so that it fits `len` and the seconds of a step; otherwise all tokens."""
STEP_SECONDS = ("timing/step_total",)


class Progress:
    """Shows steps, the current phase, the numbers that matter and the time left.

    >>> with Progress(80, "Qwen3-0.6B · group_norm") as progress:
    ...     progress.phase("generation")
    ...     progress.step(1, {"reward": 0.43, "response_length": 5.2, "timing/step_total": 3.2})
    ...     progress.evaluation(1, {"eval_default_pass1": 0.5})

    Leaving the block, also by Ctrl-C, gives the terminal back as it was.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        now: Callable[[], float] = time.monotonic,
        notes: NoteLog | None = None,
    ) -> None:
        """`live` None: live when `stream` (stderr) is a terminal that can move its cursor, and without a `stream` in a
        notebook. `notes` keeps what is said in words, for the report."""
        shows_cells = stream is None and live is None and in_notebook()
        stream = sys.stderr if stream is None else stream
        if live is None:
            live = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._run = RunSoFar(total_steps=total_steps, title=title, now=now)
        self._notes = notes
        self._screen: _Screen
        if shows_cells:
            self._screen = _NotebookScreen(self._run)
        else:
            self._screen = _LiveScreen(self._run, stream) if live else _PlainScreen(self._run, stream)

    def __enter__(self) -> Self:
        self._screen.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.begin_phase("")
        if kind is not None:
            how = "interrupted" if issubclass(kind, KeyboardInterrupt) else "stopped"
            self.note(f"{how} after step {self._run.step} of {self._run.total_steps}")
        self._screen.close()

    def phase(self, name: str) -> None:
        """The current phase; "" for none."""
        self._run.begin_phase(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` (the first is 1) is done."""
        self._run.finish_step(step, metrics)
        if self._notes is not None:
            self._notes.step = step
        self._screen.step()

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.evaluation = _evaluation_text(step, metrics)
        self._screen.line(self._run.evaluation)

    def end_early(self, why: str) -> None:
        """No further step will come."""
        self.note(f"ended after step {self._run.step} of at most {self._run.total_steps}: {why}")
        self._run.total_steps = self._run.step

    def note(self, text: str) -> None:
        """A line for people that stays, on the terminal and in the report."""
        self.line(text)
        if self._notes is not None:
            self._notes.write("note", text)

    def line(self, text: str) -> None:
        """A line on the terminal, of what is kept elsewhere."""
        self._screen.line(text)


class RunSoFar:
    """The values that both displays show."""

    def __init__(self, *, total_steps: int, title: str, now: Callable[[], float]) -> None:
        self.total_steps = total_steps
        self.title = title
        self.step = 0
        self.metrics: Mapping[str, float] = {}
        self.rewards: list[float] = []
        self.evaluation = ""
        self.phase = ""
        self._now = now
        self._start = self._phase_start = self._step_start = now()
        self._step_seconds: deque[float] = deque(maxlen=20)

    def begin_phase(self, name: str) -> None:
        self.phase = name
        self._phase_start = self._now()

    def finish_step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._now()
        self._step_seconds.append(first_of(metrics, STEP_SECONDS, default=now - self._step_start))
        self._step_start = now
        self.step = step
        self.metrics = metrics
        reward = first_of(metrics, REWARD)
        if math.isfinite(reward):
            self.rewards.append(reward)

    @property
    def elapsed(self) -> float:
        return self._now() - self._start

    @property
    def phase_elapsed(self) -> float:
        return self._now() - self._phase_start

    @property
    def seconds_per_step(self) -> float:
        """Mean of the latest steps; NaN before the first."""
        return sum(self._step_seconds) / len(self._step_seconds) if self._step_seconds else math.nan

    @property
    def seconds_left(self) -> float:
        return self.seconds_per_step * max(0, self.total_steps - self.step)


class _Screen(Protocol):
    def open(self) -> None: ...
    def step(self) -> None: ...
    def line(self, text: str) -> None: ...
    def close(self) -> None: ...


class _PlainScreen:
    """`step 12/80  reward 0.431  len   5.2  loss -0.0021  tok/s  12,345    3.2 s/step  eta 3:40`"""

    def __init__(self, run: RunSoFar, stream: TextIO) -> None:
        self._run = run
        self._stream = stream

    def open(self) -> None:
        self.line(self._run.title)

    def step(self) -> None:
        self.line(plain_line(self._run))

    def line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class _LiveScreen:
    """A few lines at the bottom of the terminal that are drawn again four times a second."""

    def __init__(self, run: RunSoFar, stream: TextIO) -> None:
        # Costs a tenth of a second, and only terminals need it.
        from rich.console import Console
        from rich.live import Live

        self._run = run
        self._console = Console(file=stream)
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=4,
            # Redirected prints would land on stderr: right only where both are the same terminal anyway.
            redirect_stdout=sys.stdout.isatty(),
        )

    def open(self) -> None:
        self._live.start()

    def step(self) -> None:
        self._live.refresh()

    def line(self, text: str) -> None:
        from rich.text import Text

        # As a Text of its own: a style given to print() would colour the live part as well.
        self._console.print(Text(text, style="dim"))

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        from rich import box
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        run = self._run
        head = Table.grid(expand=True, padding=(0, 2, 0, 0))
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        head.add_row(
            ProgressBar(
                total=max(run.total_steps, 1), completed=run.step, complete_style="cyan", finished_style="green"
            ),
            Text.assemble(
                (f"{run.step}/{run.total_steps}", "bold"),
                ("  elapsed ", "dim"),
                clock_text(run.elapsed),
                ("  left ", "dim"),
                clock_text(run.seconds_left),
                (f"  {run.seconds_per_step:.1f} s/step" if run.step else "", "dim"),
            ),
        )
        body: list[Any] = [head]
        if run.step:
            body.append(self._numbers())
        if run.evaluation:
            body.append(Text(run.evaluation, style="green", overflow="ellipsis", no_wrap=True))
        phase = f"{run.phase} {clock_text(run.phase_elapsed)}" if run.phase else ""
        return Panel(
            Group(*body),
            title=Text(run.title, style="bold"),
            title_align="left",
            subtitle=Text(phase, style="cyan"),
            subtitle_align="left",
            border_style="dim",
            box=box.ROUNDED,
        )

    def _numbers(self) -> RenderableType:
        from rich.text import Text

        text = Text(overflow="ellipsis", no_wrap=True)
        for name, value in fields(self._run):
            text.append(f"{name} ", "dim")
            text.append(value.strip(), "bold red" if "nan" in value or "inf" in value else "bold")
            if name == "reward":
                text.append(f" {sparkline(self._run.rewards, width=14)}", "green")
            text.append("  ")
        return text


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class _NotebookScreen:
    """A panel below the cell that is drawn again after every step, and the lines that stay. What a saved notebook keeps
    is the last of it."""

    SECONDS = 0.25
    """The least time between two drawings, but for the last: a browser may be far away."""

    def __init__(self, run: RunSoFar) -> None:
        self._run = run
        self._lines: list[str] = []
        self._handle: Any = None
        self._drawn = -math.inf

    def open(self) -> None:
        show = sys.modules["IPython.display"].display
        self._handle = show(self._bundle(), raw=True, display_id=True)

    def step(self) -> None:
        self._draw()

    def line(self, text: str) -> None:
        self._lines.append(text)
        self._draw()

    def close(self) -> None:
        self._draw(last=True)

    def _draw(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if self._handle is not None and (last or now - self._drawn >= self.SECONDS):
            self._drawn = now
            self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        """The same as text and as HTML, of which a notebook shows the best that it can."""
        run = self._run
        now = plain_line(run) if run.step else ""
        numbers = "".join(f"<span>{name} <b>{value.strip()}</b></span>" for name, value in fields(run) if run.step)
        if run.rewards:
            numbers += f"<span>{sparkline(run.rewards, width=24)}</span>"
        left = f" · {clock_text(run.seconds_left)} left" if run.step else ""
        clocks = f"{run.step}/{run.total_steps} · {clock_text(run.elapsed)} elapsed{left}"
        lines = "\n".join(html.escape(line) for line in self._lines)
        page = (
            f'<div style="font-family:system-ui,sans-serif;line-height:1.6"><b>{html.escape(run.title)}</b><br>'
            f'<progress value="{run.step}" max="{max(run.total_steps, 1)}" style="width:24em"></progress> {clocks}'
            f'<div style="display:flex;gap:1.2em;flex-wrap:wrap">{numbers}</div>'
            f'<pre style="margin:0;white-space:pre-wrap;opacity:.75">{lines}</pre></div>'
        )
        return {"text/plain": "\n".join(line for line in (run.title, now, *self._lines) if line), "text/html": page}


def plain_line(run: RunSoFar) -> str:
    """The latest step in one line, of the same layout every time."""
    width = len(str(run.total_steps))
    numbers = "".join(f"  {name} {value}" for name, value in fields(run))
    pace = f"{run.seconds_per_step:5.1f} s/step  eta {clock_text(run.seconds_left)}"
    return f"step {run.step:>{width}}/{run.total_steps}{numbers}  {pace}"


def fields(run: RunSoFar) -> list[tuple[str, str]]:
    """(name, number of fixed width) of what the latest step reported; what it did not report is left out."""
    shown = [
        ("reward", REWARD, "{:6.3f}"),
        ("len", LENGTH, "{:6.1f}"),
        ("loss", LOSS, "{:8.4f}"),
        ("acc", ACCURACY, "{:5.3f}"),
        ("tok/s", TOKENS_PER_SECOND, "{:7,.0f}"),
    ]
    found = [(name, pattern, first_of(run.metrics, keys, default=None)) for name, keys, pattern in shown]
    return [(name, pattern.format(value)) for name, pattern, value in found if value is not None]


def first_of(metrics: Mapping[str, float], names: Iterable[str], *, default: Any = math.nan) -> Any:
    """The first of these metrics that is there."""
    return next((metrics[name] for name in names if metrics.get(name) is not None), default)


def clock_text(seconds: float) -> str:
    """
    >>> clock_text(220), clock_text(3725), clock_text(float("nan"))
    ('3:40', '1:02:05', '–:––')
    """
    if not math.isfinite(seconds):
        return "–:––"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def sparkline(values: list[float], *, width: int) -> str:
    """The whole course of `values` in at most `width` characters, each the mean of its share.

    >>> sparkline([0, 1, 2, 3], width=4)
    '▁▃▆█'
    """
    if not values:
        return ""
    width = min(width, len(values))
    cuts = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    if high == low:
        return "▄" * width
    return "".join("▁▂▃▄▅▆▇█"[min(7, int((mean - low) / (high - low) * 8))] for mean in means)


def _evaluation_text(step: int, metrics: Mapping[str, float]) -> str:
    shown = [f"{n.removeprefix('eval_').removeprefix('default_')} {metrics[n]:.3f}" for n in score_names(metrics)]
    if length := metrics.get("eval_response_length_mean"):
        shown.append(f"len {length:.1f}")
    if failed := metrics.get("eval_failed"):
        shown.append(f"failed {failed:.0f}")
    return "  ".join([f"eval at step {step}", *dict.fromkeys(shown)])


if TYPE_CHECKING:
    _: list[type[_Screen]] = [_PlainScreen, _LiveScreen, _NotebookScreen]
