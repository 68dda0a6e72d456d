"""What a reward server counts, in the text that Prometheus reads. Imports the standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "openrlhf_reward_"
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SECOND_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Histogram:
    """How often a value was at most each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        place = next((i for i, bound in enumerate(self._bounds) if value <= bound), len(self._bounds))
        self._counts[place] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.9g}"
        yield f"{name}_count {total}"


class ServerMetrics:
    """Counters since the start. `batch` is called by the model's thread, the rest by the event loop."""

    def __init__(self) -> None:
        self._requests: Counter[int] = Counter()
        self._queries = 0
        self._tokens = 0
        self._seconds = Histogram(SECOND_BOUNDS)
        self._batches = Histogram(BATCH_BOUNDS)

    def request(self, status: int, *, seconds: float) -> None:
        """A request to /get_reward was answered."""
        self._requests[status] += 1
        self._seconds.observe(seconds)

    def scored(self, queries: int) -> None:
        self._queries += queries

    def batch(self, *, queries: int, tokens: int) -> None:
        self._batches.observe(queries)
        self._tokens += tokens

    def render(self, *, ready: bool, under_way: int) -> str:
        by_status = [f'{{status="{status}"}} {count}' for status, count in sorted(self._requests.items())]
        families: list[tuple[str, str, str, Iterator[str]]] = [
            ("ready", "gauge", "1 once the model is loaded", iter([f" {int(ready)}"])),
            ("queries_under_way", "gauge", "queries accepted and not answered yet", iter([f" {under_way}"])),
            ("requests_total", "counter", "requests to /get_reward by the status of the answer", iter(by_status)),
            ("queries_total", "counter", "queries scored", iter([f" {self._queries}"])),
            ("tokens_total", "counter", "tokens in forwards", iter([f" {self._tokens}"])),
        ]
        lines: list[str] = []
        for name, kind, text, values in families:
            lines += _head(name, kind, text)
            lines += [f"{PREFIX}{name}{value}" for value in values]
        for name, text, histogram in (
            ("batch_queries", "queries per forward", self._batches),
            ("request_seconds", "from the request to its answer, whatever the status", self._seconds),
        ):
            lines += _head(name, "histogram", text)
            lines += histogram.lines(PREFIX + name)
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"]
