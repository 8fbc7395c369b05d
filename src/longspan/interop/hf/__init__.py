"""longspan models as models of `transformers` 5. The public names are in `longspan.hf`."""
