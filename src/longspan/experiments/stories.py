"""Small stories in simple English, made from a few hundred words: a text that a small model learns in a minute.

A story names a child, a thing, a place and an animal in its first sentences and uses them again to its end, a few
hundred characters later. So most of what is hard to predict can be remembered.
"""

import random

CHILDREN = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Hugo",
    "Ida",
    "Jonas",
    "Leo",
    "Mira",
    "Nils",
    "Olga",
    "Paul",
    "Rosa",
    "Sami",
    "Tara",
    "Viktor",
]
COLOURS = ["red", "blue", "green", "yellow", "white", "black", "silver", "golden", "striped", "tiny"]
THINGS = ["kite", "boat", "drum", "lamp", "book", "ball", "coat", "basket", "ladder", "whistle", "mirror", "clock"]
PLACES = [
    "river",
    "forest",
    "harbour",
    "market",
    "garden",
    "mountain",
    "bridge",
    "mill",
    "lake",
    "castle",
    "station",
    "meadow",
]
ANIMALS = ["fox", "crow", "goat", "otter", "heron", "badger", "hedgehog", "owl", "hare", "swan"]
WEATHER = ["The sun was high.", "It was raining.", "The wind was cold.", "Snow lay on the path.", "Fog hid the hills."]
MOVES = ["walked", "ran", "went", "climbed", "came"]
FEELINGS = ["happy", "tired", "hungry", "proud", "afraid", "surprised"]


def story(draw: random.Random) -> str:
    """One story of about 450 characters."""
    pick = draw.choice
    name, place, animal = pick(CHILDREN), pick(PLACES), pick(ANIMALS)
    thing, feeling = f"{pick(COLOURS)} {pick(THINGS)}", pick(FEELINGS)
    lines = [
        f"{name} had a {thing}.",
        f"One {pick(['morning', 'evening', 'day'])} {name} {pick(MOVES)} to the {place} with the {thing}.",
        pick(WEATHER),
        f"At the {place} there was a {pick(['young', 'grey', 'lame', 'quiet'])} {animal}.",
        pick(
            [
                f'"Is that your {thing}?" asked the {animal}.',
                f'"Give me the {thing}," said the {animal}.',
                f'"What are you doing at the {place}?" asked the {animal}.',
            ]
        ),
        pick(
            [
                f'"Yes," said {name}, "but you may have it."',
                f'"No," said {name}, and was {feeling}.',
                f"{name} did not answer, for {name} was {feeling}.",
            ]
        ),
        pick(
            [
                f"So the {animal} took the {thing} and {pick(MOVES)} away from the {place}.",
                f"Then {name} and the {animal} played with the {thing} until it was dark.",
                f"They left the {thing} at the {place} and {pick(MOVES)} home.",
            ]
        ),
        f"That night {name} dreamed of the {animal} and of the {thing}.",
    ]
    return "\n".join(lines) + "\n\n"


def stories(size: int, seed: int) -> str:
    """At least `size` characters of stories."""
    draw, parts, total = random.Random(seed), [], 0
    while total < size:
        parts.append(story(draw))
        total += len(parts[-1])
    return "".join(parts)
