import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from longspan.data import documents, open_corpus, word_counts
from longspan.data.word_counts import WordCounts
from longspan.tokenizers import WordTokenizer


def test_counts_on_disk_are_those_of_a_counter() -> None:
    """With room for 7 words, also the order of first appearance and ties."""
    words = [f"w{int(random.Random(k).paretovariate(0.7))}é" for k in range(3000)]
    for most in (7, 100, 10**6):
        with WordCounts(most) as counts:
            for k in range(0, len(words), 50):
                counts.add(Counter(words[k : k + 50]))
            assert (len(counts.runs) > 10) == (most == 7)
            expected = {word: count for word, count in Counter(words).items() if count >= 2}
            found = counts.frequent(2)
        assert list(found.items()) == list(expected.items())
        assert WordTokenizer.from_counts(found).words[2:] == tuple(w for w, n in Counter(words).most_common() if n >= 2)


def test_a_killed_count_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after any task; counts that were not noted are made again. A damaged or foreign folder is not used."""
    monkeypatch.setattr(word_counts, "_SECONDS", 0.0)
    words = [f"w{int(random.Random(k).paretovariate(0.7))}" for k in range(600)]
    tasks = [words[k : k + 50] for k in range(0, 600, 50)]
    for killed in (0, 1, 5, 11):
        folder = tmp_path / str(killed)
        folder.mkdir()
        first = WordCounts(folder=folder)
        for task in tasks[:killed]:
            first.add(Counter(task), 10)
        with WordCounts(folder=folder) as counts:
            assert (counts.tasks, counts.read) == (killed, 10 * killed)
            for task in tasks[counts.tasks :]:
                counts.add(Counter(task), 10)
            assert list(counts.frequent(2).items()) == [item for item in Counter(words).items() if item[1] >= 2]
    (folder / "3").write_text("shorter")
    assert WordCounts(folder=folder).tasks == 0
    monkeypatch.setattr(documents, "TASK_BYTES", 999)
    assert WordCounts(folder=tmp_path / "5").tasks == 0


def test_a_large_vocabulary_is_counted_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly 5,003 words with room for 1,000; progress over counting and encoding; a stop in between."""
    draw = np.random.default_rng(1)
    order = np.concatenate([draw.permutation(5003), draw.integers(0, 5003, 20_000)])
    (tmp_path / "text.txt").write_text(
        "\n".join(" ".join(f"w{k}" for k in row) for row in np.split(order[:25_000], 1000))
    )
    monkeypatch.setattr(documents, "TASK_BYTES", 10_000)
    monkeypatch.setattr(WordCounts.__init__, "__defaults__", (1000, None))
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(word_counts, "_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        open_corpus(tmp_path / "text.txt", None, "words", cache=tmp_path / "cache", progress=progress)
    assert list((tmp_path / "cache/tokenizers").glob(".part-*/journal.json"))
    text = open_corpus(tmp_path / "text.txt", None, "words", cache=tmp_path / "cache", progress=progress)
    assert seen[5][0] > seen[4][0], "counting continues after the tasks that were counted before"
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == 2 * (tmp_path / "text.txt").stat().st_size
    assert text.tokenizer.size == len(np.unique(order[:25_000])) + 2 == 5005
    assert [path.suffix for path in (tmp_path / "cache/tokenizers").iterdir()] == [".json"]
