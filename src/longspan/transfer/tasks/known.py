"""Known tasks, one line each: title, packed files with their checksums, and what does not follow from the rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspan.data.cache import cache_folder
from longspan.errors import UnknownNameError


@dataclass(frozen=True)
class KnownTask:
    """`given` are values of a task.toml where they do not follow from the rows. A task without a kind is scored by
    likelihood (`evaluate-tasks`) and has no training split. `form` names the converter of packed.py."""

    name: str
    title: str
    sources: Mapping[str, str]
    """Path in the source folder and SHA-256 of each packed file."""
    given: Mapping[str, Any] = field(default_factory=dict)
    form: str = "json"
    trainable: bool = True
    version: int = 1
    """Of the installed rows. A change of the converter needs a new one, or caches keep the former rows."""

    def folder(self, cache: Path) -> Path:
        return cache / "tasks" / (self.name if self.version == 1 else f"{self.name}-{self.version}")


def _tar(name: str, sha256: str) -> dict[str, str]:
    return {f"tasks/{name}.tar.xz": sha256}


_CONLL = {
    "conll2003/eng.train.xz": "261e8c6a3cc90a2a5893a2e551cbb1c9bacbf85b2ffaff369efb2467f71e8fd1",
    "conll2003/eng.testa.xz": "a30c8d1984c73fa675487b6e501748be927325aee9cb21396c91a98e09f7c4ab",
    "conll2003/eng.testb.xz": "9dd37c2c719b8719b4ee30f9f5115fee018d54284bbaba529a225786e14dc8f7",
}
_LAMBADA = {
    "lambada/lambada_dev.jsonl.xz": "d4414da6aae4455813fd9a557985235a434222b7c61ace95a7aabb40d0a866d8",
    "lambada/lambada_test.jsonl.xz": "b781750cea211f37d9ec62ee5900a55a756209a4902fcd42c054e97fb33b02ae",
}
_IMDB = {"imdb.tar.xz": "4c114ce48cd6451fa48494ad6f4986623822f10ee5e52bc307b86af1b4a55c4d"}
_SST2 = _tar("sst2", "6d730f7a8a0c275e4dbfebda303e76ae4b3aaddc2000a3f47bede833f9f67c7d")
_COLA = _tar("cola", "a8f4405e594f336b07639cc85ecc52a9e24a80abcf5e35ac482f9fecbc33a0d3")
_RTE = _tar("rte", "25dad32629347cf009248f02f64cd8c58e111edbbbdca3af283d726e8d73604e")
_CB = _tar("cb", "042b62a63645025fe42394b519e901a231f050166aa0bf3a84e854d669fef0d0")
_MRPC = _tar("mrpc", "2a5de13f4d226d9a0efc838f5cb97e1812dd3faef707583f262dc2bd217702bf")
_STSB = _tar("sts-b", "13e4d4315fbf960f0373a1f9dab589e829cff5db64b4d80353272d1f59a9a382")
_COPA = _tar("copa", "3a884793f6a9efcaed75de0edbaa2a19e566aa85b121898216c9747a351c2be5")
_TREC = _tar("trec6", "b3e3687c5d624771561ef1c4307fcf70caf97f464579245f7def4eed7acbea52")
_BLIMP = _tar("blimp", "6bd36e80d4e33f0bc69f6d53f60d21df8681a42903b886c7588ddfc56ee41286")

_WIKITEXT2 = {"wikitext-2.tar.xz": "c28951446afd2de013c519b1fb089d698538efe4712f8bd094c032987a53d8ea"}

_TASKS = (
    KnownTask("imdb", "sentiment of film reviews", _IMDB, form="imdb"),
    KnownTask("sst2", "sentiment of sentences", _SST2),
    KnownTask("cola", "acceptability of sentences", _COLA, {"metrics": ["matthews", "accuracy"]}),
    KnownTask("rte", "entailment, two classes", _RTE),
    KnownTask("cb", "entailment, three classes", _CB, {"metrics": ["accuracy", "macro-f1"]}),
    KnownTask("mrpc", "paraphrases", _MRPC, {"metrics": ["accuracy", "f1"], "symmetric": True}),
    KnownTask("sts-b", "similarity from 0 to 5", _STSB, {"metrics": ["pearson", "spearman"]}),
    KnownTask("copa", "cause or effect, two choices", _COPA, form="copa"),
    KnownTask("trec6", "kinds of questions, six classes", _TREC),
    KnownTask("conll2003", "named entities in news", _CONLL, form="conll"),
    KnownTask("lambada", "last word of a passage", _LAMBADA, form="lambada", trainable=False),
    KnownTask("blimp", "minimal pairs of grammar", _BLIMP, form="blimp", trainable=False),
    KnownTask("wikitext2", "WikiText-2 as prose", _WIKITEXT2, form="wikitext", trainable=False, version=2),
)

KNOWN: dict[str, KnownTask] = {task.name: task for task in _TASKS}


@dataclass(frozen=True)
class TaskRow:
    """A known task in a list."""

    name: str
    title: str
    trainable: bool
    sha256: dict[str, str]
    installed: bool


def list_tasks(cache: Path | None = None) -> list[TaskRow]:
    """Every known task, and whether it is installed in the cache."""
    root = cache_folder(cache)
    return [
        TaskRow(task.name, task.title, task.trainable, dict(task.sources), task.folder(root).is_dir())
        for task in KNOWN.values()
    ]


def find_known(name: str) -> KnownTask:
    if name not in KNOWN:
        raise UnknownNameError("task", name, KNOWN, otherwise="or use a folder with train.jsonl or train.csv")
    return KNOWN[name]
