"""Metrics for Prometheus, under vLLM's names with the prefix `jaxllm:`."""

import math
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
            160, 640, 2560)  # fmt: skip
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class ServerMetrics:
    """The server's counters."""

    def __init__(self, model: str) -> None:
        self.registry, self._model = CollectorRegistry(), model

        def gauge(name: str, text: str) -> Any:
            return Gauge(f"jaxllm:{name}", text, ["model_name"], registry=self.registry).labels(
                model
            )

        def counter(name: str, text: str, *labels: str) -> Any:
            made = Counter(f"jaxllm:{name}", text, ["model_name", *labels], registry=self.registry)
            return made if labels else made.labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(
                f"jaxllm:{name}", text, ["model_name"], buckets=buckets, registry=self.registry
            ).labels(model)

        self.running = gauge("num_requests_running", "Requests that have a row.")
        self.waiting = gauge("num_requests_waiting", "Requests that wait for a row.")
        self.cache_bytes = gauge("prefix_cache_bytes", "Bytes of the prefix cache.")
        self.cache_evictions = gauge("prefix_cache_evictions", "Chunks that gave way to others.")
        self.programs = gauge("programs_to_compile", "Usual programs to compile; NaN if unknown.")
        self.programs.set(math.nan)
        self.restarts = gauge("model_restarts", "Starts of the model's process after the first.")
        self.tasks = gauge("event_loop_tasks", "Tasks of the HTTP process's event loop.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up.")
        self.cache_hits = counter("prefix_cache_hits", "Prompt tokens found.")
        self.draft_counts = (  # in the order of `DraftStats`
            counter("spec_decode_num_draft_tokens", "Tokens that a draft proposed."),
            counter("spec_decode_num_accepted_tokens", "Those of them that the model accepted."),
            counter("spec_decode_num_drafts", "Proposals of tokens."),
        )
        self._success = counter("request_success", "Finished requests.", "finished_reason")
        self._failure = counter("request_failure", "Refused requests and failures.", "status")
        self._first = histogram("time_to_first_token_seconds", "Until the first token.", _SECONDS)
        self._gap = histogram("inter_token_latency_seconds", "Between two tokens.", _SECONDS)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time between tokens.", _SECONDS
        )
        self._whole = histogram("e2e_request_latency_seconds", "Until the end.", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "Until a row.", _SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "Row to first token.", _SECONDS)
        self._decode = histogram("request_decode_time_seconds", "First token to end.", _SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._new = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)

    def count_failure(self, status: int) -> None:
        """Count an answer that is an error."""
        self._failure.labels(self._model, str(status)).inc()

    def count_vectors(self, tokens: int) -> None:
        """Count a finished request for vectors or ranks, and its tokens, as vLLM does."""
        self.prompt_tokens.inc(tokens)
        self._success.labels(self._model, "stop").inc()

    def render(self) -> bytes:
        """Return the page."""
        return generate_latest(self.registry)

    def follow(self) -> "_Request":
        """Return the clock of a new request."""
        return _Request(self)


class _Request:
    """The times of one request."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._arrival = self._started = time.perf_counter()
        self._first = self._last = 0.0

    def see(self, frame: dict[str, Any]) -> None:
        """Record a frame of the model's process."""
        seconds, m = time.perf_counter(), self._metrics
        if "started" in frame:
            self._started = seconds
            m._queue.observe(seconds - self._arrival)
        elif "chunk" in frame:
            m.generation_tokens.inc()
            if self._first:
                m._gap.observe(seconds - self._last)
            else:
                self._first = seconds
                m._first.observe(seconds - self._arrival)
                m._prefill.observe(seconds - self._started)
            self._last = seconds
        elif "done" in frame:
            done = frame["done"]
            m.prompt_tokens.inc(done["prompt_tokens"])
            m.cache_queries.inc(done["prompt_tokens"])
            m.cache_hits.inc(done["cached_tokens"])
            for count, number in zip(m.draft_counts, done["draft_stats"], strict=False):
                count.inc(number)
            m._prompt.observe(done["prompt_tokens"])
            m._new.observe(done["completion_tokens"])
            m._whole.observe(seconds - self._arrival)
            m._success.labels(m._model, done["finish_reason"]).inc()
            if self._first:
                m._decode.observe(self._last - self._first)
            if done["completion_tokens"] > 1:
                m._per_token.observe((self._last - self._first) / (done["completion_tokens"] - 1))

    def timings(self, done: dict[str, Any]) -> dict[str, Any]:
        """Return the times of a finished request, in milliseconds, under llama.cpp's names.

        As there, the first token belongs to the prompt: the rate is that of the tokens after it.
        """
        prompt, new = done["prompt_tokens"] - done["cached_tokens"], done["completion_tokens"]
        prompt_s = max(0.0, self._first - self._started)
        new_s = max(0.0, self._last - self._first)
        return {
            "cache_n": done["cached_tokens"],
            "prompt_n": prompt,
            "prompt_ms": 1e3 * prompt_s,
            "prompt_per_token_ms": 1e3 * prompt_s / prompt if prompt else 0.0,
            "prompt_per_second": prompt / prompt_s if prompt_s else 0.0,
            "predicted_n": new,
            "predicted_ms": 1e3 * new_s,
            "predicted_per_token_ms": 1e3 * new_s / (new - 1) if new > 1 else 0.0,
            "predicted_per_second": (new - 1) / new_s if new_s else 0.0,
        }
