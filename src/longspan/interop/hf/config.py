"""The configuration of a longspan model in `transformers`."""

from collections.abc import Mapping
from typing import Any, no_type_check

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from longspan import config
from longspan.checkpoints.model_folder import override, reading_of
from longspan.contract import LanguageModel
from longspan.models import families


@no_type_check  # `strict` checks its fields, and its __init__ accepts more than it declares
@strict
class LongspanConfig(PreTrainedConfig):
    """`family`, the keys of its config (`model`) and how it is read (`reading`), as in the config.json of longspan."""

    model_type = "longspan"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (a list in `transformers`)

    family: str = "longspan-xl"
    model: dict[str, Any] | None = None
    reading: dict[str, Any] | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        cls = families.family(self.family)
        made: Any = config.build(cls.Config, self.model or {}, "model")
        self.model = config.plain(made)
        reading = override(self.family, cls.reading, self.reading or {})
        self.reading = {key: value for key, value in config.plain(reading).items() if key in cls.settings}
        self.tie_word_embeddings = bool(getattr(made, "tie_embedding", False))
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, model: LanguageModel, **kwargs: Any) -> "LongspanConfig":
        """The configuration of a model."""
        return cls(
            family=families.name_of(model), model=config.plain(model.config), reading=reading_of(model), **kwargs
        )

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.model or {}

    @property
    def vocab_size(self) -> int:
        return int(self.settings["vocabulary"])

    @property
    def hidden_size(self) -> int:
        return int(self.settings["width"])

    @property
    def num_hidden_layers(self) -> int:
        return int(self.settings["layers"])

    def build(self) -> LanguageModel:
        """The model with new weights."""
        reading = override(self.family, families.family(self.family).reading, self.reading or {})
        return families.build(self.family, self.settings, reading)
