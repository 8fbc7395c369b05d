"""Stop strings, compared with a search in the complete text."""

import random

import pytest

from longspan.decoding.stop import StopText
from longspan.errors import ConfigError


def test_pieces_give_the_text_before_the_first_stop() -> None:
    """Random texts over two letters, in random pieces: many starts of a stop string that do not complete it."""
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choices("ab", k=draw.randrange(12)))
        stops = ["".join(draw.choices("ab", k=draw.randrange(1, 5))) for _ in range(draw.randrange(3))]
        until, found, at = StopText(stops), "", 0
        while at < len(text) and not until.stopped:
            size = draw.randrange(1, 4)
            found, at = found + until.push(text[at : at + size]), at + size
        found += until.close()
        # The first stop string to be complete wins; of several complete at once, the first to begin.
        read = text[:at]
        places = [read.find(stop) for stop in stops if stop in read]
        assert until.stopped == bool(places)
        assert found == (read[: min(places)] if places else text)


@pytest.mark.parametrize("stops", ["ab", [""]])
def test_stops_are_a_list_of_strings(stops: object) -> None:
    with pytest.raises(ConfigError, match="stop="):
        StopText(stops)  # type: ignore[arg-type]
