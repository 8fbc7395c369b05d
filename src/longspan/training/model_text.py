"""The text that a model is measured on, read as its run reads it."""

from collections.abc import Sequence
from pathlib import Path

from longspan import config
from longspan.data import Encoded, open_corpus
from longspan.data.encoded import Progress
from longspan.errors import ConfigError
from longspan.tokenizers import Tokenizer
from longspan.training.recipe import DataConfig


def open_text_for(
    models: Sequence[Path],
    data: str | Path,
    tokenizer: Tokenizer,
    split: str | None = None,
    *,
    field: str | None = None,
    encoding: str | None = None,
    sentences: bool | None = None,
    progress: Progress | None = None,
) -> Encoded:
    """A text for models with this tokenizer. If one of them was trained on `data`, defaults are those of its run: the
    files of valid and test, the field, the encoding, and whether sentences are documents."""
    tables = [table for model in models if (table := data_config_of(model, str(data))) is not None]
    given = tables[0] if tables else DataConfig()
    text = open_corpus(
        data,
        split,
        tokenizer,
        held_out=given.held_out,
        field=field or given.field,
        encoding=encoding or given.encoding,
        progress=progress,
    )
    return text.by_sentence() if (given.sentences if sentences is None else sentences) else text


def data_config_of(model: Path, corpus: str) -> DataConfig | None:
    """The data table of the run that `model` belongs to, if the run was trained on `corpus`.

    Without its valid and test files, a split of that corpus would contain text that the model was trained on.
    """
    for folder in (model, model.parent):
        try:
            data = config.build(DataConfig, config.read_toml(folder / "recipe.toml").get("data", {}), "data")
        except (ConfigError, AttributeError):  # no recipe, or not a valid one
            continue
        return data if Path(data.corpus).resolve() == Path(corpus).resolve() else None
    return None
