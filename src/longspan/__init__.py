"""Language models that remember beyond their window.

import longspan

model = longspan.load()                      # the bundled model, or longspan.load("runs/tiny")
print(model.generate("It was late", 200))
print(model.score("some text").bits)
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"
__all__ = [
    "ByteTokenizer",
    "CharacterTokenizer",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Decoder",
    "DeviceError",
    "Dynamics",
    "GenerationError",
    "Head",
    "LanguageModel",
    "LongspanError",
    "Predictor",
    "Reading",
    "ReadingSettings",
    "Sampling",
    "Score",
    "Session",
    "State",
    "StateError",
    "SubwordTokenizer",
    "Surprisal",
    "TextModel",
    "Tokenizer",
    "TrainingError",
    "UnknownNameError",
    "WordTokenizer",
    "__version__",
    "build",
    "embed",
    "evaluate_tasks",
    "finetune",
    "generate",
    "import_model",
    "init",
    "load",
    "load_predictor",
    "open_decoder",
    "open_task",
    "score",
    "train",
]

if TYPE_CHECKING:
    from longspan.api import build, generate, import_model, init, load, score, train
    from longspan.contract import Decoder, Head, LanguageModel, State
    from longspan.decoding.open import open_decoder
    from longspan.decoding.sampling import Sampling
    from longspan.decoding.session import Session
    from longspan.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DeviceError,
        GenerationError,
        LongspanError,
        StateError,
        TrainingError,
        UnknownNameError,
    )
    from longspan.reading import Reading, ReadingSettings
    from longspan.scoring.dynamic import Dynamics
    from longspan.scoring.score import Score
    from longspan.scoring.surprisal import Surprisal
    from longspan.text_model import TextModel
    from longspan.tokenizers import ByteTokenizer, CharacterTokenizer, SubwordTokenizer, Tokenizer, WordTokenizer
    from longspan.transfer.embed import embed
    from longspan.transfer.finetune import finetune
    from longspan.transfer.likelihood import evaluate_tasks
    from longspan.transfer.predict import Predictor, load_predictor
    from longspan.transfer.tasks import open_task

# Imported on first use: torch takes seconds to import, and `longspan --help` does not need it.
_MODULES = {
    "longspan.api": (
        "build",
        "generate",
        "import_model",
        "init",
        "load",
        "score",
        "train",
    ),
    "longspan.contract": (
        "Decoder",
        "Head",
        "LanguageModel",
        "State",
    ),
    "longspan.decoding.open": ("open_decoder",),
    "longspan.decoding.sampling": ("Sampling",),
    "longspan.decoding.session": ("Session",),
    "longspan.errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "DeviceError",
        "GenerationError",
        "LongspanError",
        "StateError",
        "TrainingError",
        "UnknownNameError",
    ),
    "longspan.reading": (
        "Reading",
        "ReadingSettings",
    ),
    "longspan.scoring.dynamic": ("Dynamics",),
    "longspan.scoring.score": ("Score",),
    "longspan.scoring.surprisal": ("Surprisal",),
    "longspan.text_model": ("TextModel",),
    "longspan.tokenizers": (
        "ByteTokenizer",
        "CharacterTokenizer",
        "SubwordTokenizer",
        "Tokenizer",
        "WordTokenizer",
    ),
    "longspan.transfer.embed": ("embed",),
    "longspan.transfer.finetune": ("finetune",),
    "longspan.transfer.likelihood": ("evaluate_tasks",),
    "longspan.transfer.predict": ("Predictor", "load_predictor"),
    "longspan.transfer.tasks": ("open_task",),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'longspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
