"""Texts: known corpora and anything else that can be read, encoded once and handed out in lanes."""

from longspan.data.corpora import CORPORA, Corpus, CorpusRow, list_corpora
from longspan.data.encoded import Encoded, open_corpus
from longspan.data.fetch import get
from longspan.data.lanes import Batch, Lanes
from longspan.data.readings import READINGS, Reading

__all__ = [
    "CORPORA",
    "READINGS",
    "Batch",
    "Corpus",
    "CorpusRow",
    "Encoded",
    "Lanes",
    "Reading",
    "get",
    "list_corpora",
    "open_corpus",
]
