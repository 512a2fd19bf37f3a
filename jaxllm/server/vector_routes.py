"""The routes that return vectors, or order documents by them."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.server.backend import Backend, json_response, read_body
from jaxllm.server.errors import invalid, unsupported
from jaxllm.server.openai_requests import is_prompt, read_model_name
from jaxllm.server.streams import unless_gone

Frame = dict[str, Any]
MAX_TEXTS = 2048  # of one request


class VectorRoutes:
    """The functions of the routes for embeddings."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def embeddings(self, request: Request) -> Response:
        body = await read_body(request)
        texts = body.get("input", body.get("content"))
        texts = [texts] if is_prompt(texts) else texts
        if (
            not isinstance(texts, list)
            or not texts
            or len(texts) > MAX_TEXTS
            or not all(map(is_prompt, texts))
        ):
            raise invalid(
                f"input must be a text, token ids, or a list of up to {MAX_TEXTS}, none empty",
                "input",
            )
        if body.get("dimensions") is not None:
            raise unsupported("dimensions", "dimensions")
        form = body.get("encoding_format") or "float"
        if form not in ("float", "base64"):
            raise invalid(f"encoding_format must be float or base64, got {form!r:.40}",
                          "encoding_format")  # fmt: skip
        names = ("prompt_name", "instruction")
        prompt = {n: body.get(n) for n in names}
        done = await self._call(request, "embed", body, texts=texts, prompt=prompt)
        data = [{"object": "embedding", "index": i, "embedding": _vector(vector, form)}
                for i, vector in enumerate(done["vectors"])]  # fmt: skip
        total = sum(done["lengths"])
        self._backend.metrics.count_vectors(total)
        return json_response(
            {"object": "list", "data": data, "model": self._backend.answer_name(body),
             "usage": {"prompt_tokens": total, "total_tokens": total}}
        )  # fmt: skip

    async def rerank(self, request: Request) -> Response:
        """Order documents by their relevance to a query."""
        body = await read_body(request)
        query, documents = body.get("query"), body.get("documents", body.get("texts"))
        if not isinstance(query, str) or not query:
            raise invalid("query must be a text, not empty", "query")
        if isinstance(documents, list):
            documents = [d.get("text") if isinstance(d, dict) else d for d in documents]
        if (
            not isinstance(documents, list)
            or not documents
            or len(documents) > MAX_TEXTS
            or not (all(isinstance(text, str) and text for text in documents))
        ):
            raise invalid(f"documents must be a list of up to {MAX_TEXTS} texts, none empty",
                          "documents")  # fmt: skip
        top = body.get("top_n", len(documents))
        if type(top) is not int or top < 1:
            raise invalid(f"top_n must be a whole number from 1, got {top!r:.40}", "top_n")
        options = {"instruction": body.get("instruction"),
                   "method": body.get("method") or self._backend.settings.rerank}  # fmt: skip
        done = await self._call(
            request, "rerank", body, query=query, documents=documents, options=options
        )
        self._backend.metrics.count_vectors(done["tokens"])
        results: list[Frame] = [
            {"index": i, "relevance_score": score} for i, score in enumerate(done["scores"])
        ]
        if body.get("return_documents"):
            for result in results:
                result["document"] = {"text": documents[result["index"]]}
        results.sort(key=lambda result: -result["relevance_score"])
        if "texts" in body:  # as text-embeddings-inference asks, and wants its answer
            return json_response([_tei_result(result, documents, body) for result in results[:top]])
        total = done["tokens"]
        return json_response(
            {"object": "list", "model": self._backend.answer_name(body), "results": results[:top],
             "usage": {"prompt_tokens": total, "total_tokens": total}}
        )  # fmt: skip

    async def _call(self, request: Request, do: str, body: Frame, **fields: Any) -> Any:
        adapter = self._backend.adapter(read_model_name(body))
        return await unless_gone(request, self._backend.call(do, adapter=adapter, **fields))


def _tei_result(result: Frame, documents: Sequence[str], body: Frame) -> Frame:
    """Return a document's rank in the form of Hugging Face's text-embeddings-inference."""
    index = result["index"]
    text = {"text": documents[index]} if body.get("return_text") else {}
    return {"index": index, "score": result["relevance_score"], **text}


def _vector(data: bytes, form: str) -> Any:
    if form == "base64":
        return base64.b64encode(data).decode()
    return [float(str(x)) for x in np.frombuffer(data, "<f4")]
