"""The models of a server, by name, and what each of them needs: an engine and its limits."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from longspan.errors import DataError
from longspan.serving.engine import Engine
from longspan.serving.errors import NOT_FOUND, ApiError
from longspan.serving.settings import Settings
from longspan.text_model import TextModel


@dataclass
class Served:
    """A model and its engine."""

    name: str
    text: TextModel
    engine: Engine
    settings: Settings
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def hash(self) -> str:
        """Identifies the model in session files: the hash of its folder, or that of its weights."""
        if self.text.hash:
            return self.text.hash
        digest = hashlib.sha256(f"{self.text.config} {self.text.tokenizer.fingerprint}".encode())
        for name, tensor in self.text.model.state_dict().items():
            digest.update(
                name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        return digest.hexdigest()

    @property
    def vocabulary(self) -> int:
        return self.engine.known

    def describe(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "longspan"}

    def prompts(self, given: Any) -> list[list[int]]:
        """The token ids of every prompt: a string, a list of strings, token ids, or a list of those."""
        if isinstance(given, str):
            return [self.encode(given)]
        if isinstance(given, list) and given:
            if all(isinstance(one, str) for one in given):
                return [self.encode(one) for one in given]
            if all(isinstance(one, list) for one in given):
                return [self.check_ids(one) for one in given]
            return [self.check_ids(given)]
        raise ApiError(
            400,
            "prompt: must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
            param="prompt",
            code="invalid_value",
        )

    def encode(self, text: str, param: str = "prompt") -> list[int]:
        """The tokens of a prompt; of an empty one the token that a stream starts with."""
        try:
            ids = self.text.tokenizer.encode_prompt(text.encode())
            return self.check_ids((ids if len(ids) else self.text.first_token()).tolist(), param)
        except UnicodeEncodeError:
            raise ApiError(
                400,
                f"{param}: the text has a lone surrogate, which UTF-8 cannot encode; remove it",
                param=param,
                code="invalid_value",
            ) from None
        except DataError as error:
            raise ApiError(400, f"{param}: {error}", param=param, code="invalid_value") from None

    def check_ids(self, ids: list[Any], param: str = "prompt") -> list[int]:
        if len(ids) > self.settings.max_prompt_tokens:
            raise ApiError(
                400,
                f"{param}: {len(ids)} tokens are more than the limit of {self.settings.max_prompt_tokens}",
                param=param,
                code="context_length_exceeded",
            )
        if not ids or any(type(one) is not int or not 0 <= one < self.vocabulary for one in ids):
            raise ApiError(
                400,
                f"{param}: must be at least one token id, and all ids must be integers between 0 and "
                f"{self.vocabulary - 1}",
                param=param,
                code="invalid_value",
            )
        return ids

    def name_of(self, token: int) -> str:
        """A token as a string; bytes that are not valid UTF-8 alone as `bytes:\\xe2`."""
        data = self.text.tokenizer.decode_bytes([token])
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Models:
    """The models of a server. A request without a model gets the first."""

    def __init__(self, texts: Mapping[str, TextModel], settings: Settings) -> None:
        self.settings = settings
        self.served = {
            name: Served(
                name, text, Engine(text, width=settings.width, rows=settings.rows, queue=settings.queue), settings
            )
            for name, text in texts.items()
        }

    def __iter__(self) -> Iterator[Served]:
        return iter(self.served.values())

    @property
    def names(self) -> Sequence[str]:
        return list(self.served)

    def find(self, name: str | None) -> Served:
        if name is None:
            return next(iter(self.served.values()))
        if name not in self.served:
            raise ApiError(
                404,
                f"there is no model {name[:80]!r}; this server has {', '.join(self.names)}",
                type=NOT_FOUND,
                param="model",
                code="model_not_found",
            )
        return self.served[name]
