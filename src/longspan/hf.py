"""longspan models in `transformers` 5: `import longspan.hf` registers them with the Auto classes.

import longspan.hf
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIR")     # made by: longspan export MODEL --to hf --out DIR
"""

from longspan.errors import ConfigError

try:
    import transformers
except ImportError:
    raise ConfigError(
        "longspan.hf needs the package `transformers`; install it with: pip install 'longspan[hf]'"
    ) from None

from longspan.interop.hf.cache import StateCache
from longspan.interop.hf.config import LongspanConfig
from longspan.interop.hf.export import convert, export_hf
from longspan.interop.hf.modeling import LongspanForCausalLM
from longspan.interop.hf.tokenizer import LongspanTokenizer
from longspan.interop.hf.trainer import MemoryTrainer, StreamDataset

__all__ = [
    "LongspanConfig",
    "LongspanForCausalLM",
    "LongspanTokenizer",
    "MemoryTrainer",
    "StateCache",
    "StreamDataset",
    "convert",
    "export_hf",
]

transformers.AutoConfig.register(LongspanConfig.model_type, LongspanConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(LongspanConfig, LongspanForCausalLM, exist_ok=True)
