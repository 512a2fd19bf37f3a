"""The process that has the model: it answers frames of the HTTP process until that one ends.

A thread of `BackgroundServer` decodes. Templates, tokenizers and grammars run in a pool of threads,
so that a long prompt delays no other request. Embeddings, ranks and scores run in another thread,
outside the batch, a piece of each request in turn.
"""

import dataclasses
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    JaxllmError,
    OverloadError,
    RequestError,
    SamplingError,
    TokenError,
)
from jaxllm.runtime.device_memory import process_memory
from jaxllm.runtime.validation import check_token_ids
from jaxllm.server.frames import FrameSocket
from jaxllm.server.gemma4 import open_turn
from jaxllm.server.harmony import as_rendered
from jaxllm.server.tools import (
    fill_content,
    find_marks,
    find_style,
    find_thought_marks,
    tool_grammar,
)

if TYPE_CHECKING:
    from jaxllm.generation.batching.programs import Programs
    from jaxllm.generation.completion import Completion, StreamChunk
    from jaxllm.generation.loops.draft import PromptLookup
    from jaxllm.lm import LM

Frame = dict[str, Any]
PREPARING_THREADS = 4
TRIM_S = 10.0  # between returns of freed memory, which take some milliseconds
# Between looks whether requests of clients are open, and how long a program waits for their ends.
IDLE_CHECK_S, MAX_WAIT_S = 0.05, 5.0
PIECE_TEXTS = 16  # texts of one request that run at once, as `jaxllm.embeddings` batches them
MAX_PROGRAMS = 96  # compiled ones in memory, of about 10 MB
_USUAL_OPTIONS: tuple[Frame, ...] = ({}, {"temperature": 0.0}, {"temperature": 1.0})
# Options that restrain a text, and how templates read thoughts of earlier turns.
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
GRAMMARS = frozenset({"json_schema", "regex", "choice", "lark", "gbnf", "grammar"})
_READS_THOUGHTS = re.compile(r"""reasoning_content|[.'"](?:thinking|reasoning)\b""")
# Tokens before, between and after the texts around what a model fills in; the suffix comes first
# where none follows.
FILL_IN_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder  # noqa: RUF001
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
    ("[SUFFIX]", "[PREFIX]", ""),  # Codestral
)
_ROLE_ENDS = "\x02"  # stands for the end of a prefilled answer; no template writes it


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """How the model runs.

    rows, capacity, slots: as in `LM.serve`; capacity 0 is the context, at most 4,096, and slots 0
    what the memory holds (`fit_slots`). max_waiting, max_waiting_tokens: as in `BackgroundServer`.
    threads: XLA's and the kernels', 0 for all cores. prefix_bytes: of the prefix cache.
    public_prefixes: system messages or texts whose keys and values the requests of all API keys
    read in place. warms_up: compile ahead, once it is ready. vectors: files of steering vectors by
    name. load_draft, draft_tokens: as the draft of `LM.serve`; a picklable function loads it.
    """

    rows: int = 8
    capacity: int = 0
    max_waiting: int = 64
    max_waiting_tokens: int = 262_144
    threads: int = 0
    prefix_bytes: int = 256 << 20
    public_prefixes: tuple[str, ...] = ()
    warms_up: bool = True
    vectors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    load_draft: Callable[[], "LM | PromptLookup"] | None = None
    draft_tokens: int = 4
    slots: int = 0


def run_model(connection: socket.socket, load: Callable[[], "LM"], settings: ModelSettings) -> None:
    """Load the model, send its `ready` frame and answer frames. The target of a new process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the HTTP process ends this one
        signal.signal(number, signal.SIG_IGN)
    frames = FrameSocket(connection)
    if settings.threads:  # before XLA creates its CPU client
        os.environ["PJRT_NPROC"] = str(settings.threads)
    try:
        process = ModelProcess(load(), settings, frames)
    except (JaxllmError, OSError) as error:
        frames.send({"failed": str(error)})
        return
    import jax

    # From the start: compiling ahead takes minutes while clients ask.
    jax.monitoring.register_event_duration_secs_listener(process.count_compile)
    frames.send({"ready": process.describe()})
    if settings.warms_up:
        threading.Thread(target=process.compile_programs, daemon=True).start()
    for frame in frames:
        process.receive(frame)
    os._exit(0)  # the HTTP process has ended: do not wait for running requests


class ModelProcess:
    """A loaded model that answers frames.

    A request is `{"id", "do", ...}`. Its answers have the same id: `chunk`s and `done` for
    "generate", `done` for all others, or `error`.
    """

    def __init__(self, lm: "LM", settings: ModelSettings, frames: FrameSocket) -> None:
        from jaxllm.cache.prefix_cache import PrefixCache
        from jaxllm.generation.background import BackgroundServer
        from jaxllm.generation.batching.pages import fit_slots
        from jaxllm.models.invariance import has_invariant_rows, make_invariant
        from jaxllm.server.steering import read_vectors

        lm = dataclasses.replace(lm, model=make_invariant(lm.model))
        usual = min(lm.config.default_cache_size, 4096)
        self.lm, self.rows, self.capacity = lm, settings.rows, settings.capacity or usual
        self._frames = frames
        self._vectors = read_vectors(settings.vectors, lm.config)
        # Without bytes it holds nothing, and bits are the same. Small chunks find more, but prompts
        # run in chunks of this size where bits depend on shapes.
        chunk = 32 if has_invariant_rows(lm.model, lm.params) else 128
        self._prefix_cache = (
            PrefixCache(settings.prefix_bytes, chunk) if lm.config.segment_length is None else None
        )
        self._options: dict[str, Any] = {
            "rows": self.rows,
            "capacity": self.capacity,
            "slots": settings.slots or fit_slots(lm.model, self.rows, self.capacity),
            "prefix_cache": self._prefix_cache,
            "shared_prefixes": _encode_prefixes(lm, settings.public_prefixes),
        }
        self._speculation: dict[str, Any] = {}
        if settings.load_draft is not None:
            self._speculation = {
                "draft": settings.load_draft(),
                "draft_tokens": settings.draft_tokens,
            }
            list(lm.serve([], **self._options, **self._speculation))  # checks them
        self._server = BackgroundServer(
            lm,
            **self._options,
            **self._speculation,
            max_waiting=settings.max_waiting,
            max_waiting_tokens=settings.max_waiting_tokens,
        )
        self._pool = ThreadPoolExecutor(PREPARING_THREADS, "jaxllm-prepare")
        self._computing = ThreadPoolExecutor(1, "jaxllm-compute")
        self._max_computing, self._num_computing = settings.max_waiting, 0
        self._cancelled: dict[int, threading.Event] = {}
        self._num_compiled, self._trim_at = 0, 0.0
        self._programs: Programs | None = None
        self._operations: dict[str, Callable[[Frame], Any]] = {
            "tokenize": self._tokenize,
            "detokenize": lambda frame: {"text": self._decode(frame["tokens"])},
            "render": lambda frame: {"text": self._render(frame)},
            "stats": lambda _: self._describe_use(),
        }
        # Each yields between its pieces and returns the answer.
        self._computations: dict[str, Callable[[Frame], Generator[None, None, Any]]] = {
            "embed": self._embed,
            "rerank": self._rerank,
            "look": _in_one_piece(self._look),
            "score": _in_one_piece(self._score),
        }

    def compile_programs(self) -> None:
        """Compile programs ahead of the requests that need them, while the model runs."""
        from jaxllm.generation.batching.compile_ahead import compile_planned

        self.warm_up()
        if self._programs is not None:
            for _ in compile_planned(self._programs, waits=True):
                self._wait_for_clients()

    def warm_up(self) -> None:
        """Compile the programs of prompts of any length, and of decoding any number of rows.

        It runs nothing. While clients' requests are open it starts a program every few seconds.
        """
        from jaxllm.generation.batching.compile_ahead import compile_planned

        if self.lm.config.score is not None:  # it predicts no tokens
            return
        usual = []
        for options in _USUAL_OPTIONS:
            with suppress(JaxllmError):  # what the checkpoint's options refuse, requests meet too
                usual.append(self.lm.prepare_request({"prompt": [0], **options}).config.sampler)
        with suppress(JaxllmError, RuntimeError):  # requests report it, if they need the program
            planned = self._server.plan_programs(usual, adapters=bool(self.lm.adapters))
            self._programs = planned.result()
            for _ in compile_planned(self._programs):
                self._wait_for_clients()
        self._num_compiled = 0  # these are no reason to forget any

    def _wait_for_clients(self) -> None:
        """Wait a few seconds while requests are open, unless one may wait for a program."""
        latest = time.monotonic() + MAX_WAIT_S
        while self._cancelled and time.monotonic() < latest:
            if self._programs is None or self._programs.is_urgent:
                break
            time.sleep(IDLE_CHECK_S)

    def _describe_use(self) -> Frame:
        use: Frame = {"memory_bytes": process_memory()}
        if self._programs is not None:
            use["programs_to_compile"] = self._programs.num_planned
        if self._prefix_cache is not None:
            use |= dataclasses.asdict(self._prefix_cache.stats())
        return use

    def describe(self) -> Frame:
        """Return what the HTTP process tells clients about the model."""
        from jaxllm.text.chat import ChatTemplate

        lm, tokenizer = self.lm, self.lm.tokenizer
        template = lm.chat_template
        special = dict(template.special_tokens) if isinstance(template, ChatTemplate) else {}
        if tokenizer is not None:
            for name, index in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
                if index is not None:
                    special.setdefault(name, tokenizer.token(index))
        return {
            "context": self.context,
            "rows": self.rows,
            "adapters": list(lm.adapters),
            "vocab_size": lm.config.vocab_size,
            "special_tokens": special,
            "tool_style": self._tool_style,
            "special_marks": list(self._marks),
            "thought_marks": self._thought_marks,
            "chat_template": template.source if isinstance(template, ChatTemplate) else None,
            "model": repr(lm),
            "sampling": {name: lm.generation[name] for name in SAMPLING if name in lm.generation},
        }

    def receive(self, frame: Frame) -> None:
        """Begin what a frame asks for; answers are sent when they are there."""
        number, do = frame["id"], frame["do"]
        if do == "cancel":
            if (event := self._cancelled.get(number)) is not None:
                event.set()
                self._server.drop_cancelled()
        elif do == "drain":
            threading.Thread(target=self._server.close, kwargs={"refuse_waiting": True}).start()
        elif do == "generate":
            self._cancelled[number] = threading.Event()
            self._pool.submit(self._generate, frame)
        elif do in self._computations:
            self._compute(frame)
        else:
            self._pool.submit(self._answer, self._operations[do], frame)

    def _answer(self, operation: Callable[[Frame], Any], frame: Frame) -> None:
        try:
            answer = {"done": operation(frame)}
        except Exception as error:
            answer = {"error": describe_failure(error)}
        self._send({"id": frame["id"], **answer})

    def _compute(self, frame: Frame) -> None:
        """Queue the first piece of a computation, or refuse it if too many are waiting."""
        number = frame["id"]
        if self._num_computing > self._max_computing:
            error = OverloadError(
                f"{self._num_computing} requests are waiting to be computed,"
                " which is the limit. Retry later"
            )
            self._send({"id": number, "error": describe_failure(error)})
            return
        self._num_computing += 1
        self._cancelled[number] = threading.Event()
        work = self._computations[frame["do"]](frame)
        self._computing.submit(self._compute_piece, number, work)

    def _compute_piece(self, number: int, work: Generator[None, None, Any]) -> None:
        """Run a piece, then queue the next one behind those of the other requests."""
        answer: Frame = {}
        try:
            if not self._cancelled[number].is_set():
                next(work)
                self._computing.submit(self._compute_piece, number, work)
                return
        except StopIteration as end:
            answer = {"done": end.value}
        except Exception as error:
            answer = {"error": describe_failure(error)}
        del self._cancelled[number]
        self._num_computing -= 1
        if answer:  # nobody waits for that of a cancelled request
            self._send({"id": number, **answer})

    def _send(self, frame: Frame) -> None:
        try:
            self._frames.send(frame)
        except OSError:  # the HTTP process has ended
            os._exit(0)

    def _generate(self, frame: Frame) -> None:
        """Prepare and queue a request; its chunks are sent from the thread that decodes."""
        number, shows_tokens = frame["id"], frame.get("logprobs") is not None
        cancelled = self._cancelled[number]
        # Calls and thoughts are read with their marks, which the text leaves out where they are
        # special tokens.
        reads_all = frame.get("tools") or self._tool_style in ("harmony", "gemma4")
        read = () if "prompt" in frame else self._marks if reads_all else self._thought_marks or ()
        marks = {self._marks[mark]: mark for mark in read if mark in self._marks}

        def send_chunk(chunk: "StreamChunk") -> None:
            text = chunk.text + marks.get(chunk.token, "")
            item: list[Any] = [text, chunk.token, chunk.finish_reason]
            if shows_tokens:
                item += self._describe_logprobs(chunk)
            self._send({"id": number, "chunk": item})

        def finish(future: "Future[Completion]") -> None:
            self._cancelled.pop(number, None)
            self._limit_memory()
            error = future.exception()
            if error is not None:
                self._send({"id": number, "error": describe_failure(error)})
                if not isinstance(error, JaxllmError) and "the model ended" in str(error):
                    os._exit(1)  # the HTTP process starts a new one
                return
            done = describe_completion(future.result())
            if done["finish_reason"] == "stop":
                done["stop_string"] = self._find_stop(future.result(), request)
            self._send({"id": number, "done": done})

        try:
            if cancelled.is_set():
                raise TokenError("cancelled")
            request, opened = self._make_request(frame)
            request |= {"on_chunk": send_chunk, "is_cancelled": cancelled.is_set}
            started = {"started": True, "prompt_tokens": len(request["prompt"]), "opened": opened}
            future = self._server.submit(
                request, on_start=lambda: self._send({"id": number, **started})
            )
        except Exception as error:
            self._cancelled.pop(number, None)
            self._send({"id": number, "error": describe_failure(error)})
            return
        future.add_done_callback(finish)

    def _find_stop(self, completion: "Completion", request: Frame) -> str | None:
        """Return the stop string that ended a text, None if the tokens do not show it."""
        text, said = self._decode(completion.tokens), completion.text or ""
        stops = request.get("stop_strings", ())
        return next((stop for stop in stops if text.startswith(stop, len(said))), None)

    def count_compile(self, event: str, duration_secs: float, **_: Any) -> None:
        """Count a program that was compiled; a listener of `jax.monitoring`."""
        self._num_compiled += event == "/jax/core/compile/backend_compile_duration"

    def _limit_memory(self) -> None:
        """Forget the compiled programs if there are too many; those in use are compiled again.

        Compiling and requests leave freed memory with the allocator, so some of it is given back.
        """
        if time.monotonic() < self._trim_at:
            return
        from jaxllm.ops.compile_cache import return_freed_memory

        if self._num_compiled > MAX_PROGRAMS:
            import jax

            self._num_compiled = 0
            jax.clear_caches()
            if self._programs is not None:
                self._programs.forget()
        return_freed_memory()
        self._trim_at = time.monotonic() + TRIM_S

    def _make_request(self, frame: Frame) -> tuple[dict[str, Any], str]:
        """Return the request of `LM.serve` that a frame describes.

        And the mark of a thought that the prompt opens, "" for none, or where a grammar restrains
        the answer from its first token.
        """
        from jaxllm.server.steering import read_steering

        options = dict(frame["options"])
        if options.get("temperature") is None and not _decides_sampling(self.lm, options):
            options["temperature"] = 1.0  # as in OpenAI's interface
        opened = ""
        if "prompt" in frame:
            asked = frame["prompt"]
            if frame.get("suffix"):
                asked = self._fill_in(asked, frame["suffix"])
            prompt = self._encode_prompt(asked, frame.get("add_special", True))
        else:
            text = self._render(frame)
            prompt, opened = self._encode_rendered(text), self._find_opened(text, frame)
        prompt = _cut_prompt(prompt, frame.get("truncate"), self.context)
        room = self.context - len(prompt)
        if room < 1:
            raise _ContextExceeded(len(prompt), self.context)
        new = options.get("max_new_tokens")
        options["max_new_tokens"] = room if new is None else min(new, room)
        options |= self._read_token_lists(frame, options)
        if frame.get("ignore_eos"):
            options["min_new_tokens"] = options["max_new_tokens"]
        is_forced = frame.get("tools") and frame["tools"]["choice"] == "required"
        if is_forced or not GRAMMARS.isdisjoint(options):
            opened = ""
        if frame.get("tools"):
            answer = options.get("json_schema")
            options |= tool_grammar(frame["tools"], self._tool_style, self._marks, answer)
        if (steering := frame.get("steering")) is not None:
            options |= read_steering(steering, self._vectors)
        if frame.get("logprobs"):
            options["top_logprobs"] = frame["logprobs"]
        return {
            **options,
            "prompt": prompt,
            "adapter": frame.get("adapter"),
            "namespace": frame.get("namespace", ""),
        }, opened

    def _find_opened(self, text: str, frame: Frame) -> str:
        """Return the mark of a thought in which a rendered conversation ends, or ""."""
        if self._thought_marks is None:
            return ""
        opening, closing = self._thought_marks
        if frame.get("continues"):
            beginning = frame["messages"][-1]["content"].lstrip()
            return opening if beginning.startswith(opening) and closing not in beginning else ""
        return opening if text.rstrip().endswith(opening) else ""

    @property
    def context(self) -> int:
        """Tokens of a prompt and its continuation."""
        config = self.lm.config
        return min(config.context_length, config.position_limit, self.capacity)

    @cached_property
    def _template_source(self) -> str:
        from jaxllm.text.chat import ChatTemplate

        template = self.lm.chat_template
        return template.select_source([]) if isinstance(template, ChatTemplate) else ""

    @cached_property
    def _tool_style(self) -> str:
        return find_style(self._template_source)

    @cached_property
    def _thought_marks(self) -> tuple[str, str] | None:
        """The marks around a thought, None without them or where it has a channel."""
        if self._tool_style in ("harmony", "gemma4"):
            return None
        return find_thought_marks(self._template_source, self.lm.tokenizer)

    @cached_property
    def _marks(self) -> dict[str, int]:
        """The ids of the marks of calls and thoughts that are special tokens."""
        return find_marks(self.lm.tokenizer)

    def _fill_in(self, prefix: str, suffix: str) -> str:
        """Return the prompt for a text between two others. Raises ConfigError."""
        tokenizer = self.lm.tokenizer
        for before, between, after in FILL_IN_TOKENS:
            names = [name for name in (before, between, after) if name]
            if tokenizer is not None and None not in map(tokenizer.id, names):
                first, second = (prefix, suffix) if after else (suffix, prefix)
                return f"{before}{first}{between}{second}{after}"
        raise ConfigError("suffix: the model has no tokens for filling in")

    def _encode_prompt(self, prompt: Any, add_special: bool = True) -> list[int]:
        """Return the ids of a prompt, whose text may name special tokens, as other servers do."""
        if add_special or not isinstance(prompt, str) or self.lm.tokenizer is None:
            return self.lm.encode(prompt, parse_special=True)
        return self.lm.encode(self.lm.tokenizer.encode(prompt, parse_special=True))

    def _read_token_lists(self, frame: Frame, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options for vLLM's `stop_token_ids` and `bad_words`. options: the others."""
        lists: dict[str, Any] = {}
        if stops := frame.get("stop_token_ids"):
            usual = options.get("eos_token_id", self.lm.generation.get("eos_token_id"))
            lists["eos_token_id"] = [*([usual] if isinstance(usual, int) else usual or ()), *stops]
        if words := frame.get("bad_words"):
            if self.lm.tokenizer is None:
                raise SamplingError("the model has no tokenizer, which bad_words require")
            banned = [self.lm.tokenizer.encode(f"{space}{word.lstrip()}")
                      for word in words for space in ("", " ")]  # fmt: skip
            lists["bad_words_ids"] = [ids for ids in banned if ids]
        return lists

    def _encode_rendered(self, text: str) -> list[int]:
        if self.lm.tokenizer is None:
            raise TokenError("the model has no tokenizer, so it cannot chat")
        return self.lm.tokenizer.encode(text, parse_special=True)

    def _render(self, frame: Frame) -> str:
        """Return a conversation as text, with an answer's beginning where one is given."""
        template = self.lm.chat_template
        if isinstance(template, JaxllmError):
            raise template
        messages, variables = frame["messages"], frame["variables"]
        if self._tool_style == "harmony":
            messages = list(map(as_rendered, messages))
        else:
            messages = fill_content(messages, self._template_source)
        if self._thought_marks and not _READS_THOUGHTS.search(self._template_source):
            messages = [self._put_thought(message) for message in messages]
        if not frame.get("continues"):
            text = template.render(messages, **variables)
            opens = self._tool_style == "gemma4" and variables.get("add_generation_prompt", True)
            return open_turn(text) if opens else text
        beginning = messages[-1]["content"]
        marked = [*messages[:-1], {**messages[-1], "content": beginning + _ROLE_ENDS}]
        text = template.render(marked, **{**variables, "add_generation_prompt": False})
        if _ROLE_ENDS not in text:
            raise ConfigError("the chat template does not show the last message")
        return text[: text.rindex(_ROLE_ENDS)]

    def _put_thought(self, message: Frame) -> Frame:
        """Return a message with its thought, between its marks, in front of the content."""
        thought = message.get("reasoning_content")
        if message["role"] != "assistant" or not thought or self._thought_marks is None:
            return message
        opening, closing = self._thought_marks
        content = f"{opening}\n{thought}\n{closing}\n\n{message.get('content') or ''}"
        return {**message, "content": content}

    def _describe_logprobs(self, chunk: "StreamChunk") -> list[Any]:
        """Return a token's log-probability, bytes and likeliest others; whether it is text."""
        top = [[self._token_bytes(t), lp] for t, lp in chunk.top_logprobs or []]
        return [chunk.logprob, self._token_bytes(chunk.token), top, self._is_text(chunk.token)]

    def _is_text(self, token: int) -> bool:
        """Whether a token's bytes are a part of the text: not those of a special token's name."""
        return self.lm.tokenizer is not None and bool(self._bytes_V[token])

    def _token_bytes(self, token: int) -> bytes:
        """Return a token's bytes; for a special token those of its name."""
        tokenizer = self.lm.tokenizer
        if tokenizer is None:
            return b""
        name = tokenizer.token(token).encode()  # of an id without a token: empty
        return (self._bytes_V[token] or name) if name else name

    @cached_property
    def _bytes_V(self) -> list[bytes]:
        from jaxllm.grammar.vocabulary import token_bytes

        assert self.lm.tokenizer is not None
        bytes_V = token_bytes(self.lm.tokenizer)
        return bytes_V + [b""] * (self.lm.config.vocab_size - len(bytes_V))

    def _decode(self, tokens: list[int]) -> str:
        check_token_ids(np.array(tokens, object), self.lm.config.vocab_size, "tokens: ")
        return self.lm.decode(tokens)

    def _tokenize(self, frame: Frame) -> Frame:
        """Return token ids, and their texts if the frame asks for pieces."""
        lm = self.lm
        if "messages" in frame:
            tokens = self._encode_rendered(self._render(frame))
        elif lm.tokenizer is None:
            raise TokenError("the model has no tokenizer")
        else:
            bos = frame["add_special"] and lm.tokenizer.adds_bos  # "" is no error here
            tokens = lm.tokenizer.encode(frame["text"], bos=bos, parse_special=True)
        pieces = [self._token_bytes(token) for token in tokens] if frame.get("pieces") else None
        return {"tokens": tokens, "pieces": pieces}

    def _embed(self, frame: Frame) -> Generator[None, None, Frame]:
        """Return float32 vectors as bytes, and the number of tokens of each text."""
        texts = self.lm.encode_texts(frame["texts"], **frame["prompt"])
        for text in texts:
            if len(text) > self.lm.config.context_length:
                raise _ContextExceeded(len(text), self.lm.config.context_length)
        vectors = [b""] * len(texts)
        for piece in _split_pieces(sorted(range(len(texts)), key=lambda i: len(texts[i]))):
            yield
            vectors_ND = self.lm.embed(
                [texts[i] for i in piece],
                adapter=frame.get("adapter"),
                show_progress=False,
                normalize=True,
            )
            for i, vector_D in zip(piece, vectors_ND, strict=True):
                vectors[i] = vector_D.astype("<f4").tobytes()
        return {"vectors": vectors, "lengths": [len(text) for text in texts]}

    def _rerank(self, frame: Frame) -> Generator[None, None, Frame]:
        """Return the relevance of each document, and the tokens of the query and the documents."""
        head = self.lm.config.score
        usual = "score" if head is not None and head.labels else "cosine"
        options = {**frame["options"], "method": frame["options"]["method"] or usual}
        query, documents = frame["query"], frame["documents"]
        scores: list[float] = []
        tokens = len(self.lm.encode(query))
        for piece in _split_pieces(documents):
            yield
            score_N = self.lm.rerank(query, piece, adapter=frame.get("adapter"), **options)
            scores += score_N.tolist()
            tokens += sum(len(self.lm.encode(text)) for text in piece)
        return {"scores": scores, "tokens": tokens}

    def _look(self, frame: Frame) -> Frame:
        """Return the branch view of a text or of token ids."""
        from jaxllm.server.branch_view import describe_tokens

        lm = self.lm.with_adapter(frame.get("adapter"))
        ids = self._encode_prompt(frame["prompt"])
        if len(ids) > self.context:
            raise _ContextExceeded(len(ids), self.context)
        return describe_tokens(lm, ids)

    def _score(self, frame: Frame) -> Frame:
        """Return each prompt token's bytes, log-probability and the likeliest tokens there."""
        from jaxllm.generation.embeddings import prompt_logprobs

        lm = self.lm.with_adapter(frame.get("adapter"))
        ids = self._encode_prompt(frame["prompt"])
        logprob_T, top_TN, top_logprob_TN = prompt_logprobs(
            lm.model, lm.params, ids, top=frame["top"]
        )
        tops = [
            [[self._token_bytes(int(t)), float(lp)] for t, lp in zip(*row, strict=True)]
            for row in zip(top_TN, top_logprob_TN, strict=True)
        ]
        return {
            "tokens": [self._token_bytes(token) for token in ids],
            "is_text": [self._is_text(token) for token in ids],
            "logprobs": logprob_T.tolist(),
            "top": tops,
        }


def _in_one_piece(answer: Callable[[Frame], Any]) -> Callable[[Frame], Generator[None, None, Any]]:
    def run(frame: Frame) -> Generator[None, None, Any]:
        yield
        return answer(frame)

    return run


def _split_pieces(items: Sequence[Any]) -> Generator[Sequence[Any]]:
    for start in range(0, len(items), PIECE_TEXTS):
        yield items[start : start + PIECE_TEXTS]


def _cut_prompt(prompt: list[int], count: int | None, context: int) -> list[int]:
    """Return a prompt's last `count` tokens (vLLM's `truncate_prompt_tokens`); -1: what fits."""
    return prompt if count is None else prompt[-(context - 1 if count == -1 else count) :]


class _ContextExceeded(CapacityError):
    """A prompt does not fit; has the numbers that clients show."""

    def __init__(self, prompt: int, context: int) -> None:
        super().__init__(f"{prompt} tokens do not fit into the context of {context}")
        self.numbers = {"n_prompt_tokens": prompt, "n_ctx": context}


def describe_failure(error: BaseException) -> Frame:
    """Return an error as a frame's value: its kind decides the HTTP status."""
    if isinstance(error, _ContextExceeded):
        return {"kind": "context", "message": str(error), **error.numbers}
    if isinstance(error, OverloadError):
        return {"kind": "overload", "message": str(error)}
    if isinstance(error, ClosedError):
        return {"kind": "unavailable", "message": "the server is shutting down"}
    if isinstance(error, RequestError):
        return {"kind": "failed", "message": str(error)}
    if isinstance(error, JaxllmError):
        kind = "context" if isinstance(error, CapacityError) else "invalid"
        return {"kind": kind, "message": str(error)}
    return {"kind": "failed", "message": f"{type(error).__name__}: {error!s:.300}"}


def describe_completion(completion: "Completion") -> Frame:
    """Return the end of a generation as a frame's value."""
    return {
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.tokens),
        "cached_tokens": completion.cached_tokens,
        "draft_stats": list(completion.draft_stats or ()),
        "seed": completion.seed,
        "grammar_complete": completion.grammar_complete,
    }


def _encode_prefixes(lm: "LM", texts: Sequence[str]) -> list[list[int]]:
    """Return public prefixes as token ids: as texts, and as system messages of the template."""
    prefixes = [lm.encode(text) for text in texts]
    for text in texts:
        with suppress(JaxllmError):  # a template may refuse a conversation of one message
            messages = [{"role": "system", "content": text}]
            prefixes.append(lm.chat_prompt(messages, add_generation_prompt=False))
    return prefixes


def _decides_sampling(lm: "LM", options: Mapping[str, Any]) -> bool:
    """Whether the request or generation_config.json says how to sample."""
    if options.get("do_sample") is not None:
        return True
    return any(lm.generation.get(name) is not None for name in ("do_sample", "temperature"))
