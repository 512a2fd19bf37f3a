"""Hostile requests, drawn at random: one function per family, each a list of bytes to send.

One decision: a case is data (pieces, pauses, how it ends), so that it can be printed and repeated.
"""

import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scripts.tools.hostile.client import encode_request

BODY_LIMIT = 256 << 10  # bytes; `hostile_requests` starts the server with it
CONTEXT = 256  # tokens
POSTS = ("/v1/completions", "/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/rerank",
         "/tokenize", "/detokenize", "/apply-template")  # fmt: skip
GETS = ("/", "/health", "/metrics", "/version", "/v1/models", "/models/x", "/tokenizer_info")
MESSAGES = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Case:
    """What one client does.

    Attributes:
        family: Name of the function that drew it.
        pieces: Bytes to send, one after the other, `pause` seconds apart.
        answers: Answers to read.
        is_http: Whether it is well-formed, so that the server must answer.
        methods: The requests' methods: an answer to HEAD has no body.
        end: How the client leaves: after the answers, or without reading them.
        delay: Seconds before it leaves by a reset or a half-close.
        slow_read: Whether the client reads with a small buffer, and waits first.
    """

    family: str
    pieces: tuple[bytes, ...]
    pause: float = 0.0
    answers: int = 1
    is_http: bool = True
    methods: tuple[str, ...] = ("POST",)
    end: Literal["read", "reset", "half-close"] = "read"
    delay: float = 0.0
    slow_read: bool = False


def draw_case(rng: random.Random) -> Case:
    """Draw a case of any family."""
    families, weights = zip(*FAMILIES.items(), strict=True)
    return rng.choices(families, weights)[0](rng)


# Values


def draw_garbage(rng: random.Random, depth: int = 0) -> Any:
    """Draw a JSON value that hardly any field takes."""
    if depth < 3 and rng.random() < 0.2:
        inner = [draw_garbage(rng, depth + 1) for _ in range(rng.randrange(4))]
        return inner if rng.random() < 0.5 else {str(i): value for i, value in enumerate(inner)}
    return rng.choice((
        None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**39,
        0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"), "", " ", "0", "1e400",
        "nan", "\x00", "\ud800", "\udfff\ud800", "é" * 30, "😀" * 9, "a" * 5000, "../../etc/passwd",
        "<|im_start|>", "</s>", "{{ 7*7 }}", "%s%n", [], {}, [[]], [None], {"": {}}, [[1], "x"],
        [10**30], {"a": 10**30}, [-1], [1, 1.5], ["x", 1], nest(40), nest(64), nest(70), nest(3000),
        {"type": "text", "text": None}, {"__class__": "x"}, list(range(300)),
    ))  # fmt: skip


def nest(depth: int) -> Any:
    """Return lists within lists; text from 100 levels on, since `json` cannot encode them."""
    if depth > 100:
        return "[" * depth + "]" * depth
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def draw_text(rng: random.Random) -> str:
    """Draw a prompt: ordinary, odd, or at the limits."""
    length = rng.choice((1, 3, 10, 40, CONTEXT // 2, CONTEXT - 2, CONTEXT, CONTEXT + 1, 2000))
    return rng.choice((
        "Once upon a time", "x", "Once " * length, "é\u200d😀" * min(length, 60), "\x00\x01\x7f",
        "<s></s>" * 9, "\u2028\ufeff", " " * length, "".join(map(chr, range(32, 127))),
    ))  # fmt: skip


def draw_options(rng: random.Random) -> dict[str, Any]:
    """Draw options of a generation; most are valid."""
    options: dict[str, Any] = {"max_tokens": rng.choice((1, 1, 2, 4, 8, 16))}
    options |= rng.choice((
        {}, {"temperature": 0}, {"temperature": 0.9, "seed": rng.randrange(99)},
        {"temperature": 1.1, "top_k": 20, "top_p": 0.9}, {"stop": ["a", "the"]}, {"stop": "\n"},
        {"n": rng.choice((2, 3, 8, 36, 37, 128, 129))}, {"logit_bias": {"5": 100, "7": -100}},
        {"max_tokens": rng.choice((0, 200, CONTEXT, CONTEXT + 1, 10**6, 2**31, 2**64))},
        {"echo": True}, {"ignore_eos": True}, {"repetition_penalty": 1.2}, {"presence_penalty": 1},
    ))  # fmt: skip
    if rng.random() < 0.4:
        options |= {"stream": True}
        if rng.random() < 0.3:
            options["stream_options"] = {"include_usage": True}
    if rng.random() < 0.15:
        options["logprobs"] = rng.choice((0, 1, 5, 20, 21))
    return options


# Names of fields whose values are checked somewhere: OpenAI's, other servers', our options.
_FIELDS = """
model prompt messages max_tokens max_completion_tokens temperature top_p n stream stream_options
stop seed logprobs top_logprobs echo logit_bias presence_penalty frequency_penalty best_of user
ignore_eos response_format structured_outputs tools tool_choice parallel_tool_calls suffix
add_generation_prompt continue_final_message chat_template_kwargs input encoding_format dimensions
query documents top_n return_documents tokens content add_special with_pieces max_new_tokens
n_predict min_new_tokens min_tokens eos_token_id stop_strings do_sample sequence_bias
repetition_penalty dry_multiplier dry_base dry_allowed_length dry_sequence_breakers
no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens min_length
forced_bos_token_id forced_eos_token_id top_n_sigma top_k min_p typical_p epsilon_cutoff
eta_cutoff xtc_probability xtc_threshold mirostat_tau mirostat_eta regex choice json_schema lark
gbnf guided_json guided_regex guided_choice fast_forward num_return_sequences num_beams
length_penalty early_stopping assistant_model num_assistant_tokens prompt_lookup_num_tokens
max_matching_ngram_size penalty_alpha guidance_scale negative_prompt overflow cache chunk adapter
batch_invariant pad_token_id
"""
FIELDS = _FIELDS.split()


def draw_body(rng: random.Random, path: str) -> dict[str, Any]:
    """Draw a body that this route takes."""
    if "chat" in path:
        return {"messages": MESSAGES, **draw_options(rng)}
    if path == "/apply-template":
        return {"messages": MESSAGES}
    if "embed" in path:
        count = rng.choice((1, 2, 5))
        return {"input": [draw_text(rng)[:200] for _ in range(count)],
                "encoding_format": rng.choice(("float", "base64"))}  # fmt: skip
    if "rerank" in path:
        return {"query": "a cat", "documents": ["a dog", "cats"], "top_n": rng.choice((1, 2, 3))}
    if path == "/tokenize":
        return {"content": draw_text(rng), "with_pieces": rng.random() < 0.5}
    if path == "/detokenize":
        return {"tokens": [rng.choice((0, 1, 5, 900, 1535, 1536, -1)) for _ in range(5)]}
    prompt: Any = draw_text(rng)
    if rng.random() < 0.3:
        prompt = [rng.randrange(1536) for _ in range(rng.choice((1, 5, CONTEXT - 1, CONTEXT)))]
    elif rng.random() < 0.1:
        prompt = [draw_text(rng), draw_text(rng)]
    return {"prompt": prompt, **draw_options(rng)}


def post(path: str, body: bytes, **headers: str) -> bytes:
    """Return the bytes of a POST."""
    return encode_request("POST", path, body, **headers)


def encode(value: Any) -> bytes:
    """Return JSON of any value, NaN and lone surrogates (escaped) included."""
    return json.dumps(value).encode()


# Families


def draw_valid(rng: random.Random) -> Case:
    """A body by the schema."""
    path = rng.choice(POSTS)
    return Case("valid", (post(path, encode(draw_body(rng, path))),))


def draw_invalid(rng: random.Random) -> Case:
    """A body of which a few fields have garbage."""
    path = rng.choice(POSTS)
    body = draw_body(rng, path)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        name = rng.choice([*FIELDS, *body, *body])
        body[name] = draw_garbage(rng)
    return Case("invalid", (post(path, encode(body)),))


def draw_text_fault(rng: random.Random) -> Case:
    """A body that is not quite JSON, or in another encoding."""
    path = rng.choice(POSTS)
    body = encode(draw_body(rng, path))
    text = body.decode()
    headers: dict[str, str] = {}
    kind = rng.randrange(13)
    if kind == 0:
        body = body[: rng.randrange(len(body))]
    elif kind == 1:
        body = b"\xef\xbb\xbf" + body
    elif kind == 2:
        body = text.encode(rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-7")))
    elif kind == 3:
        body = body.replace(b"a", rng.choice((b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xc0\x80")))
    elif kind == 4:
        body, headers = gzip.compress(body), {"content_encoding": "gzip"}
    elif kind == 5:
        body = body[:-1] + b',"prompt":"x","prompt":"y","input":"z","input":"z"}'
    elif kind == 6:
        body = body[:-1] + b',"user":' + b"[" * rng.choice((65, 1000, 100_000))
    elif kind == 7:
        body = body[:-1] + b',"seed":' + b"9" * rng.choice((19, 20, 40, 41, 5000)) + b"}"
    elif kind == 8:
        body = rng.choice((b"", b"null", b"[]", b"{}", b'"x"', b"0", b"\x00", b"{" * 999, b"NaN"))
    elif kind == 9:
        body = body[:-1] + rng.choice((b",}", b"}}", b'} {"a":1}', b",'a':1}", b',"a":01}'))
    elif kind == 10:
        body = body.replace(b":", b":\x0b", 1)
    elif kind == 11:
        body = rng.randbytes(rng.choice((1, 10, 1000)))
    else:
        headers = {"content_type": rng.choice(("text/plain", "application/json; charset=utf-16",
                   "multipart/form-data; boundary=x", "", "x" * 900))}  # fmt: skip
    return Case("text", (post(path, body, **headers),))


def draw_route(rng: random.Random) -> Case:
    """Any path with any method."""
    path = rng.choice((
        *POSTS, *GETS, *GETS, "/../../etc/passwd", "/..%2f..%2fetc/passwd", "/page.js/../app.py",
        "/%2e%2e/%2e%2e/app.py", "/page%2ejs", "/models/..%2f..", "/v1/models/" + "x" * 3000, "//",
        "/%00", "/%ff%fe", "/v1/models/%F0%9F%98%80", "/health?x=%zz&y", "/health/", "/v1", "/;a=b",
        "/v1/models/%ed%a0%80", "/?" + "a" * 5000, "*", "http://example.org/health",
        "//example.org/health", "/http:%2f%2fx/", "/[", "/a:b@c", "http://[/", "http://[::1]:x/",
    ))  # fmt: skip
    method = rng.choice(("GET", "GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE",
                         "CONNECT", "PROPFIND", "get", "X" * 200))  # fmt: skip
    body = b"{}" if method in ("POST", "PUT", "PATCH") else None
    return Case("route", (encode_request(method, path, body),), methods=(method,), is_http=False)


def draw_header(rng: random.Random) -> Case:
    """Headers that are wrong, many or large."""
    body = encode({"prompt": "x", "max_tokens": 1})
    request = post("/v1/completions", body)
    fault = rng.choice((
        b"host: [\r\n", b"host: a\x7fb:99999999\r\n", b"host: \r\nhost: localhost\r\n", b"a\r\n",
        b": x\r\n",
        b"a b: c\r\n", b"x: \x00\r\n", b"x: \xff\xfe\r\n", b" folded: x\r\n",
        b"x:" + b"y" * 20_000 + b"\r\n", b"x: y\r\n" * 500, b"x: y\r\n" * 5000,
        b"content-length: -1\r\n",
        b"content-length: 5\r\n", b"content-length: 99999999999999999999\r\n",
        b"content-length: 1e3\r\n", b"transfer-encoding: chunked\r\n",
        b"transfer-encoding: gzip\r\n",
        b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: x\r\n",
        b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\n", b"connection: close\r\n",
        b"connection: keep-alive\r\n", b"expect: 100-continue\r\n", b"expect: 200-maybe\r\n",
        b"x-request-id: " + b"z" * 300 + b"\r\n", b"x-request-id: \xc3\xa9\r\n",
        b"authorization: Bearer\r\n", b"authorization: Basic eA==\r\n", b"origin: null\r\n",
        b"accept-encoding: gzip\r\n", b"range: bytes=0-\r\n", b"te: trailers\r\n", b"cookie: a\r\n",
        b"origin: https://x\r\naccess-control-request-method: POST\r\n", b"x-forwarded-for: [\r\n",
    ))  # fmt: skip
    kind = rng.random()
    if kind < 0.7:
        first, rest = request.split(b"\r\n", 1)
        request = first + b"\r\n" + fault + rest
        if fault.startswith(b"host: [") or fault.startswith(b"host: a"):
            request = request.replace(b"host: localhost\r\n", b"")
            request = request.replace(b"POST /v1/completions", rng.choice(
                (b"POST /v1/completions", b"POST /nothing", b"PUT /health")))  # fmt: skip
    else:
        request = rng.choice((
            b"GET /health HTTP/1.0\r\n\r\n", b"GET /health\r\n\r\n",
            b"GET /health HTTP/2.0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9, b"\r\n\r\n", b"\x00" * 99,
            b"GET  /health  HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\n\n", b"A" * 70_000,
            b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n",
            b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", rng.randbytes(500),
            b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 12_000,
        ))  # fmt: skip
    return Case("header", (request,), is_http=False, end="half-close", delay=2.0)


def draw_framing(rng: random.Random) -> Case:
    """Bodies whose length is wrong, chunked, cut short, or around the limit."""
    path = rng.choice(POSTS[:2])
    body = encode({"prompt": "x", "max_tokens": 1})
    head = b"POST " + path.encode() + b" HTTP/1.1\r\nhost: localhost\r\n"
    chunked = head + b"transfer-encoding: chunked\r\n\r\n"
    middle = rng.randrange(1, len(body))
    whole = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (body[:middle], body[middle:]))
    kind = rng.randrange(12)
    if kind == 0:
        return Case("framing", (chunked + whole + b"0\r\n\r\n",))
    if kind == 1:
        return Case("framing", (chunked, whole[: rng.randrange(len(whole))]), is_http=False,
                    end=rng.choice(("reset", "half-close")), delay=0.05)  # fmt: skip
    if kind == 2:
        fault = rng.choice((b"zz\r\nx\r\n", b"-1\r\nx\r\n", b"ffffffffffffffffffff\r\nx",
                            b"5\r\nabc\r\n", b"3;a=b\r\nabc\r\n0\r\nx: y\r\n\r\n",
                            b"3\nabc\n0\n\n"))  # fmt: skip
        return Case("framing", (chunked + fault,), is_http=False, end="half-close", delay=0.1)
    if kind == 3:
        more = head + b"content-length: %d\r\n\r\n" % (len(body) + rng.choice((1, 100, 9**6)))
        return Case("framing", (more + body,), is_http=False, delay=0.05,
                    end=rng.choice(("reset", "half-close")))  # fmt: skip
    if kind == 4:  # the rest is read as a second request
        less = head + b"content-length: %d\r\n\r\n" % middle
        return Case("framing", (less + body,), is_http=False, answers=2)
    if kind == 5:
        size = BODY_LIMIT + rng.choice((-1, 0, 1, 1000))
        large = b'{"prompt":"x","max_tokens":1,"user":"' + b"y" * (size - 39) + b'"}'
        return Case("framing", (post(path, large),))
    if kind == 6:
        sizes = (BODY_LIMIT + 1, 2**40)
        return Case("framing", (head + b"content-length: %d\r\n\r\n" % rng.choice(sizes),))
    if kind == 7:
        part = b"10000\r\n" + b" " * 65536 + b"\r\n"
        return Case("framing", (chunked, *[part] * 5), is_http=False, answers=1)
    if kind == 8:
        expects = head + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body)
        return Case("framing", (expects, body), pause=0.02)
    if kind == 9:
        return Case("framing", tuple(bytes([b]) for b in post(path, body)), pause=0.001)
    if kind == 10:
        expects = head + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % (BODY_LIMIT + 1)
        return Case("framing", (expects,))
    get = b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n"
    return Case("framing", (get, b"ab"), is_http=False, methods=("GET",), pause=0.02)


def draw_leave(rng: random.Random) -> Case:
    """A good request whose client leaves: at once, in the queue, while it is answered."""
    path = rng.choice(POSTS[:4])
    body = {**draw_body(rng, path), "max_tokens": rng.choice((1, 30, 150))}
    request = post(path, encode(body | rng.choice(({}, {"stream": True}, {"n": 3}))))
    if rng.random() < 0.2:
        request = request[: rng.randrange(len(request))]
    return Case("leave", (request,), end=rng.choice(("reset", "reset", "half-close")),
                delay=rng.choice((0.0, 0.001, 0.01, 0.05, 0.3)), is_http=False)  # fmt: skip


def draw_slow_reader(rng: random.Random) -> Case:
    """A client that reads late and little."""
    body: dict[str, Any] = rng.choice((
        {"prompt": "Once", "max_tokens": 100, "stream": True, "n": 2},
        {"prompt": ["Once", "A"], "max_tokens": 50, "logprobs": 5, "stream": True},
    ))  # fmt: skip
    return Case("slow reader", (post("/v1/completions", encode(body)),), slow_read=True)


def draw_pipeline(rng: random.Random) -> Case:
    """Several requests in one write, or over one connection."""
    requests, methods = [], []
    for _ in range(rng.randrange(2, 7)):
        if rng.random() < 0.5:
            method = rng.choice(("GET", "HEAD"))
            requests.append(encode_request(method, rng.choice(GETS)))
        else:
            method, path = "POST", rng.choice(POSTS)
            requests.append(post(path, encode(draw_body(rng, path))))
        methods.append(method)
    case = rng.random()
    pieces = (b"".join(requests),) if case < 0.6 else tuple(requests)
    end: Any = "reset" if case > 0.9 else "read"
    return Case("pipeline", pieces, answers=len(requests), methods=tuple(methods), end=end,
                pause=0.01)  # fmt: skip


HOSTILE_REGEXES = (
    "(a+)+$", "(a|a)*b", "(.*)*x", "((a{0,100}){0,100}){0,100}", "(a?){50}a{50}", "[a-z]{1000}",
    "(x{0,999}){0,999}", ".{5000}", "(?=a)b", "(?P<n>a)(?P=n)", "\\", "[", "(", "*", "(?i)ß+", "",
    "\\p{L}+", "[\ud800]", "(a*)*" * 20, "|".join("ab" * 400), "(" * 500 + ")" * 500, "a{99999999}",
    "[^\\x00-\\U0010ffff]", "$^", "(.|\n){0,40}(.|\n){0,40}x", "\\b\\B", "(ab|ba|aab|bba)*c{0,64}",
)  # fmt: skip


def draw_schema(rng: random.Random) -> Any:
    """Draw a schema that is recursive, huge, contradictory or malformed."""
    deep: Any = {"type": "string"}
    for _ in range(rng.choice((5, 25))):
        deep = {"type": "object", "properties": {"a": deep, "b": deep}}  # shared, so JSON doubles
        if len(encode(deep)) > 20_000:
            break
    return rng.choice((
        {"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}},
         "$ref": "#/$defs/a"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"enum": [f"value {i}" for i in range(rng.choice((10, 5000)))]}, {"enum": []}, {"not": {}},
        {"type": "string", "pattern": rng.choice(HOSTILE_REGEXES)}, {"type": "nothing"}, True,
        False,
        {"type": "integer", "minimum": 5, "maximum": 3}, {"type": "string", "minLength": 10**9},
        {"type": "array", "minItems": 10**6, "items": {"type": "null"}}, {"allOf": [{}] * 1000},
        {"oneOf": [{"const": i} for i in range(300)]}, {"$ref": "http://example.org/x.json"},
        {"$ref": "file:///etc/passwd"}, {"$ref": "#/definitions/none"}, {"multipleOf": 0}, deep,
        {"type": "number", "multipleOf": 1e-300}, {"properties": {"a" * 5000: True}},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}},
        {"patternProperties": {"(a+)+$": {}}}, {"format": "date-time", "type": "string"},
        {"required": ["x"] * 500}, {"properties": draw_garbage(rng)}, {"type": draw_garbage(rng)},
        draw_garbage(rng),
    ))  # fmt: skip


def draw_grammar(rng: random.Random) -> Case:
    """Regular expressions, schemas and grammars that are exponential, recursive or malformed."""
    lark = rng.choice((
        "start: start", "start: a\na: b\nb: a", 'start: "a" start | "b"', "start: /(a+)+/", "x: y",
        "start: " + "(" * 200 + '"a"' + ")" * 200, "%import common.NUMBER", "start: %json {}",
        "start: " + " | ".join(f'"{i}"' for i in range(900)), "\x00", 'start: "a"~0..99999999',
    ))  # fmt: skip
    gbnf = rng.choice((
        "root ::= root", 'root ::= "a"{0,99999999}', "root ::= [^", 'root ::= ("a"*)*',
        "root ::= x", "root ::= " + "(" * 3000, 'root ::= "' + "a" * 9000 + '"',
    ))  # fmt: skip
    body = {"prompt": "Once", "max_tokens": rng.choice((1, 8)), **rng.choice((
        {"regex": rng.choice(HOSTILE_REGEXES)},
        {"structured_outputs": {"regex": rng.choice(HOSTILE_REGEXES)}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": draw_schema(rng)}}},
        {"json_schema": draw_schema(rng)}, {"lark": lark}, {"gbnf": gbnf}, {"grammar": gbnf},
        {"choice": rng.choice((["a"] * 5000, [f"{i}" * 9 for i in range(3000)], [""], ["\ud800"],
                               [1, 2], "a", ["a" * 9000], [[]]))},
        {"response_format": draw_garbage(rng)},
        {"response_format": {"type": "json_object", "schema": draw_schema(rng)}},
    ))}  # fmt: skip
    if rng.random() < 0.3:
        body["stream"] = True
    return Case("grammar", (post("/v1/completions", encode(body)),))


def draw_chat(rng: random.Random) -> Case:
    """Messages and tools of every malformed shape."""
    good: Any = {"role": rng.choice(("user", "assistant", "tool", "system")), "content": "x"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": rng.choice(
        ("{}", "{", "[" * 100_000, '{"a": NaN}', '{"a": "\ud800"}', "1" * 5000, {"a": 1}, 5, None,
         '{"a": 1' + "0" * 30 + "}"))}}  # fmt: skip
    message = rng.choice((
        draw_garbage(rng), {}, {"role": "user"}, {"role": draw_garbage(rng), "content": "x"},
        {"role": "user", "content": draw_garbage(rng)}, {**good, "name": draw_garbage(rng)},
        {"role": "user", "content": [draw_garbage(rng)]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}] * 50},
        {"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": draw_garbage(rng)},
        {"role": "tool", "content": "x", "tool_call_id": draw_garbage(rng)}, good,
        {"role": "assistant", "content": "\x02"}, {"role": "user", "content": "x" * 5000},
    ))  # fmt: skip
    messages: Any = [good, message, *([good] * rng.randrange(2))]
    if rng.random() < 0.1:
        messages = rng.choice((draw_garbage(rng), [], [good] * 2000, message))
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": draw_schema(rng)}}
    tools = rng.choice((
        draw_garbage(rng), [tool], [tool] * 300, [draw_garbage(rng)], [{"type": "function"}], [],
        [{"type": "function",
          "function": {"name": rng.choice(("", "\n", '"', "\ud800", "x" * 9999))}}],
        [{"type": "function", "function": draw_garbage(rng)}],
    ))  # fmt: skip
    choice = rng.choice((
        "auto", "required", "none", draw_garbage(rng), {"type": "function"},
        {"type": "function", "function": draw_garbage(rng)}, {"type": "allowed_tools"},
        {"type": "function", "function": {"name": rng.choice(("f", "g"))}},
        {"type": "allowed_tools", "allowed_tools": draw_garbage(rng)},
        {"type": "allowed_tools",
         "allowed_tools": {"mode": "required", "tools": draw_garbage(rng)}},
        {"type": "allowed_tools", "allowed_tools": {"tools": [draw_garbage(rng)]}},
        {"type": "function", "function": {"name": draw_garbage(rng)}},
    ))  # fmt: skip
    body = {"messages": messages, "max_tokens": 4, **rng.choice((
        {}, {"tools": tools}, {"tools": tools, "tool_choice": choice}, {"tool_choice": choice},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": choice},
        {"chat_template_kwargs": draw_garbage(rng)}, {"continue_final_message": draw_garbage(rng)},
        {"chat_template_kwargs": {rng.choice(("messages", "self", "tools", "", "a b", "bos_token",
         "add_generation_prompt")): draw_garbage(rng)}}, {"add_generation_prompt": False},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"logprobs": True, "top_logprobs": rng.choice((0, 5, 20, 21, -1))},
    ))}  # fmt: skip
    path = rng.choice(("/v1/chat/completions", "/chat/completions", "/apply-template", "/tokenize"))
    return Case("chat", (post(path, encode(body)),))


def draw_slow_body(rng: random.Random) -> Case:
    """A body that never ends, until the server stops to wait for it."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{"
    return Case("slow body", (head,))


def draw_slow_head(rng: random.Random) -> Case:
    """Headers that never end, until the server closes the connection."""
    return Case("slow head", (b"GET /health HTTP/1.1\r\n", b"x: y\r\n"), pause=0.5, is_http=False,
                methods=("GET",))  # fmt: skip


FAMILIES: dict[Callable[[random.Random], Case], float] = {
    draw_valid: 14, draw_invalid: 26, draw_text_fault: 8, draw_route: 8, draw_header: 8,
    draw_framing: 8, draw_leave: 8, draw_slow_reader: 0.5, draw_pipeline: 4, draw_grammar: 7,
    draw_chat: 14, draw_slow_body: 0.1, draw_slow_head: 0.1,
}  # fmt: skip


def describe(pieces: Sequence[bytes], limit: int = 700) -> str:
    """Return a case's bytes as text that fits a terminal."""
    text = repr(b"".join(pieces))
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"
