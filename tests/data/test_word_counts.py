import random
from collections import Counter

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
