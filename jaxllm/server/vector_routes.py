"""The routes that return vectors, or order documents by them."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.server.backend import ServerBackend, json_response, read_body
from jaxllm.server.errors import invalid
from jaxllm.server.openai_requests import ModelFields, Text, check_fields, is_prompt
from jaxllm.server.streams import unless_gone

Frame = dict[str, Any]
MAX_TEXTS = 2048  # of one request


class _Embeddings(ModelFields, kw_only=True):
    input: Text | Annotated[list[Any], Meta(min_length=1, max_length=MAX_TEXTS)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    prompt_name: str | None = None
    instruction: str | None = None


class _Document(Struct):
    text: Text


class _Rerank(ModelFields, kw_only=True):
    query: Text
    documents: Annotated[list[Text | _Document], Meta(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, Meta(ge=1)] = MAX_TEXTS
    instruction: Any = None
    method: Any = None
    return_documents: bool = False
    return_text: bool = False


class VectorRoutes:
    """The functions of the routes for embeddings."""

    def __init__(self, backend: ServerBackend) -> None:
        self._backend = backend

    async def embeddings(self, request: Request) -> Response:
        body = await read_body(request)
        fields = check_fields({"input": body.get("content"), **body}, _Embeddings)
        texts = [fields.input] if is_prompt(fields.input) else fields.input
        if not all(map(is_prompt, texts)):
            raise invalid("input must be a text, token ids, or a list of them, none empty", "input")
        prompt = {"prompt_name": fields.prompt_name, "instruction": fields.instruction}
        done = await self._call(request, "embed", fields, texts=texts, prompt=prompt)
        form = fields.encoding_format
        data = [
            {
                "object": "embedding",
                "index": i,
                "embedding": _vector(_shorten(vector, fields.dimensions), form),
            }
            for i, vector in enumerate(done["vectors"])
        ]
        total = sum(done["lengths"])
        self._backend.metrics.count_vectors(total)
        return json_response(
            {"object": "list", "data": data, "model": self._backend.answer_name(fields.model),
             "usage": {"prompt_tokens": total, "total_tokens": total}}
        )  # fmt: skip

    async def rerank(self, request: Request) -> Response:
        """Order documents by their relevance to a query."""
        body = await read_body(request)
        fields = check_fields({"documents": body.get("texts"), **body}, _Rerank)
        documents = [d.text if isinstance(d, _Document) else d for d in fields.documents]
        method = fields.method or self._backend.settings.rerank
        done = await self._call(
            request, "rerank", fields, query=fields.query, documents=documents,
            options={"instruction": fields.instruction, "method": method},
        )  # fmt: skip
        self._backend.metrics.count_vectors(done["tokens"])
        results: list[Frame] = [
            {"index": i, "relevance_score": score} for i, score in enumerate(done["scores"])
        ]
        if fields.return_documents:
            for result in results:
                result["document"] = {"text": documents[result["index"]]}
        results.sort(key=lambda result: -result["relevance_score"])
        if "texts" in body:  # as text-embeddings-inference asks, and wants its answer
            return json_response(
                [_tei_result(result, documents, fields) for result in results[: fields.top_n]]
            )
        total = done["tokens"]
        return json_response(
            {"object": "list", "model": self._backend.answer_name(fields.model),
             "results": results[: fields.top_n],
             "usage": {"prompt_tokens": total, "total_tokens": total}}
        )  # fmt: skip

    async def _call(self, request: Request, do: str, asked: ModelFields, **fields: Any) -> Any:
        adapter = self._backend.adapter(asked.model)
        return await unless_gone(request, self._backend.call(do, adapter=adapter, **fields))


def _tei_result(result: Frame, documents: Sequence[str], fields: _Rerank) -> Frame:
    """Return a document's rank in the form of Hugging Face's text-embeddings-inference."""
    index = result["index"]
    text = {"text": documents[index]} if fields.return_text else {}
    return {"index": index, "score": result["relevance_score"], **text}


def _shorten(data: bytes, dimensions: int | None) -> bytes:
    """Return a vector's first numbers, scaled to norm 1 again (Matryoshka embeddings)."""
    if dimensions is None:
        return data
    vector_D = np.frombuffer(data, "<f4")
    if dimensions > len(vector_D):
        message = f"dimensions must be at most {len(vector_D)}, got {dimensions}"
        raise invalid(message, "dimensions")
    first_D = vector_D[:dimensions]
    return (first_D / max(float(np.linalg.norm(first_D)), 1e-12)).astype("<f4").tobytes()


def _vector(data: bytes, form: str) -> Any:
    if form == "base64":
        return base64.b64encode(data).decode()
    return [float(str(x)) for x in np.frombuffer(data, "<f4")]
