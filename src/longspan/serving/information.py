"""Models, health and tokens."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from longspan.serving.errors import ApiError
from longspan.serving.openai_types import DetokenizeRequest, TokenizeRequest
from longspan.serving.requests import parse, server_of

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [served.describe() for served in server_of(request).models]}


@router.get("/v1/models/{name}")
async def model(request: Request, name: str) -> dict[str, Any]:
    return server_of(request).models.find(name).describe()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """200 while all decode loops run."""
    failed = [served.name for served in server_of(request).models if not served.engine.alive]
    return JSONResponse({"status": "failed" if failed else "ok", "failed": failed}, 503 if failed else 200)


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 if a request would be taken now."""
    server = server_of(request)
    full = [s.name for s in server.models if not s.engine.alive or s.engine.load >= server.settings.queue]
    busy = server.closing or bool(full)
    return JSONResponse({"status": "busy" if busy else "ready", "full": full}, 503 if busy else 200)


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    asked = await parse(request, TokenizeRequest)
    served = server_of(request).models.find(asked.model)
    tokens = served.encode(asked.prompt) if asked.prompt else []
    found: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
    if asked.return_token_strs:
        found["token_strs"] = [served.name_of(token) for token in tokens]
    return found


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, Any]:
    asked = await parse(request, DetokenizeRequest)
    served = server_of(request).models.find(asked.model)
    if not isinstance(asked.tokens, list):
        raise ApiError(400, "tokens: must be a list of token ids", param="tokens", code="invalid_value")
    ids = served.check_ids(asked.tokens, "tokens") if asked.tokens else []
    return {"prompt": served.text.tokenizer.decode(ids)}


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> dict[str, Any]:
    served = server_of(request).models.find(model)
    tokenizer = served.text.tokenizer
    end = tokenizer.document_end_id
    return {
        "model": served.name,
        "kind": tokenizer.kind,
        "unit": tokenizer.unit,
        "size": tokenizer.size,
        "document_end_id": end,
        "eos_token": None if end is None else tokenizer.decode([end]),
        "bos_token": tokenizer.decode(served.encode("")),
        "pad_token": None,
        "fingerprint": tokenizer.fingerprint,
    }
