"""Texts: known corpora and any other file or folder, encoded once and read in batch streams."""

from longspan.data.batch_streams import Batch, BatchStreams
from longspan.data.corpora import CORPORA, Corpus, CorpusRow, list_corpora
from longspan.data.encoded import Encoded, describe_all, open_corpus
from longspan.data.fetch import get
from longspan.data.tokenizer_specs import TOKENIZER_SPECS, TokenizerSpec

__all__ = [
    "CORPORA",
    "TOKENIZER_SPECS",
    "Batch",
    "BatchStreams",
    "Corpus",
    "CorpusRow",
    "Encoded",
    "TokenizerSpec",
    "describe_all",
    "get",
    "list_corpora",
    "open_corpus",
]
