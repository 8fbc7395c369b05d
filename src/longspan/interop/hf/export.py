"""A folder that `transformers` loads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.bundled import model_path
from longspan.checkpoints.model_folder import DTYPES, find_model, open_model
from longspan.contract import LanguageModel
from longspan.errors import ConfigError, LongspanError
from longspan.interop.hf.modeling import LongspanForCausalLM
from longspan.interop.hf.tokenizer import LongspanTokenizer, convert_tokenizer
from longspan.tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODULE = "longspan_model"
_CODE = '''\
"""Lets `trust_remote_code=True` find the classes of longspan. It must be installed: pip install 'longspan[hf]'"""

from longspan.hf import LongspanConfig, LongspanForCausalLM, LongspanTokenizer

__all__ = ["LongspanConfig", "LongspanForCausalLM", "LongspanTokenizer"]
'''
_CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# A {family} model of longspan

```python
import longspan.hf  # pip install 'longspan[hf]'; or trust_remote_code=True below
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
```
"""


@dataclass(frozen=True)
class HfExport:
    """What was written, and the folder it came from."""

    source: Path
    parameters: int
    dtype: str


def convert(model: LanguageModel, tokenizer: Tokenizer) -> tuple[LongspanForCausalLM, "PreTrainedTokenizerBase"]:
    """A model and its tokenizer as those of `transformers`. The weights are shared."""
    made = convert_tokenizer(tokenizer)
    converted = LongspanForCausalLM.of(model, eos_token_id=made.eos_token_id)
    # The config must not name it: it is outside the vocabulary.
    converted.generation_config.pad_token_id = made.pad_token_id
    return converted, made


def export_hf(
    model: str | Path | None, out: str | Path, *, dtype: str = "float32", reading: Mapping[str, Any] | None = None
) -> HfExport:
    """Write a model folder or run as a folder of `transformers`: config with auto_map, weights, tokenizer, card.

    The weights are float32 by default: `transformers` keeps the dtype of a file, and bfloat16 is slow on a CPU.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; choose a new folder")
    found = find_model(model_path(model))
    loaded = open_model(found, overrides=reading, dtype=DTYPES[dtype])
    loaded.model.require_next_token()  # it becomes a causal language model
    converted, tokenizer = convert(loaded.model, loaded.tokenizer)
    converted.config.auto_map = {
        "AutoConfig": f"{MODULE}.LongspanConfig",
        "AutoModelForCausalLM": f"{MODULE}.LongspanForCausalLM",
    }
    if isinstance(tokenizer, LongspanTokenizer):
        tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": [f"{MODULE}.LongspanTokenizer", None]}
    try:
        out.mkdir(parents=True, exist_ok=True)
        converted.save_pretrained(out)
        tokenizer.save_pretrained(out)
        (out / f"{MODULE}.py").write_text(_CODE, encoding="utf-8")
        (out / "README.md").write_text(_CARD.format(family=converted.config.family, name=out.name), encoding="utf-8")
    except OSError as error:
        raise LongspanError(f"{out} cannot be written: {error.strerror or error}") from None
    return HfExport(found.path, loaded.model.parameter_count, dtype)
