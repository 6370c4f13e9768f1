"""What can be asked about a scene or about animals in general, and the right answers, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from menagerie_scenes import ANIMALS, Scene, place_name

NUMBERS = ("None", "One", "Two", "Three", "Four")
PLURALS = {"fish": "fish", "fox": "foxes", "octopus": "octopuses", "sheep": "sheep"}

# One row an animal: what it says, how many legs, where it lives, what it eats, what its young is called, does it fly.
FACTS: dict[str, tuple[str, str, str, str, str, str]] = {
    "bee": ("Buzz", "Six", "In a hive", "Nectar", "A larva", "Yes"),
    "cat": ("Meow", "Four", "In a house", "Fish", "A kitten", "No"),
    "chicken": ("Cluck", "Two", "On a farm", "Grain", "A chick", "No"),
    "cow": ("Moo", "Four", "On a farm", "Grass", "A calf", "No"),
    "crab": ("Nothing", "Ten", "On the beach", "Algae", "A larva", "No"),
    "dog": ("Woof", "Four", "In a house", "Meat", "A puppy", "No"),
    "duck": ("Quack", "Two", "On a pond", "Plants", "A duckling", "Yes"),
    "elephant": ("Toot", "Four", "In the savanna", "Leaves", "A calf", "No"),
    "fish": ("Blub", "None", "In the water", "Plants", "A fry", "No"),
    "fox": ("Yip", "Four", "In the forest", "Mice", "A cub", "No"),
    "frog": ("Ribbit", "Four", "On a pond", "Flies", "A tadpole", "No"),
    "horse": ("Neigh", "Four", "On a farm", "Hay", "A foal", "No"),
    "lion": ("Roar", "Four", "In the savanna", "Meat", "A cub", "No"),
    "monkey": ("Ooh ooh", "Two", "In the jungle", "Bananas", "An infant", "No"),
    "octopus": ("Nothing", "Eight", "In the sea", "Crabs", "A larva", "No"),
    "owl": ("Hoo", "Two", "In the forest", "Mice", "An owlet", "Yes"),
    "panda": ("Bleat", "Four", "In the mountains", "Bamboo", "A cub", "No"),
    "penguin": ("Honk", "Two", "On the ice", "Fish", "A chick", "No"),
    "pig": ("Oink", "Four", "On a farm", "Everything", "A piglet", "No"),
    "rabbit": ("Nothing", "Four", "In a burrow", "Carrots", "A kit", "No"),
    "sheep": ("Baa", "Four", "On a farm", "Grass", "A lamb", "No"),
    "snake": ("Hiss", "None", "In the desert", "Mice", "A hatchling", "No"),
    "tiger": ("Roar", "Four", "In the jungle", "Meat", "A cub", "No"),
    "turtle": ("Nothing", "Four", "In the sea", "Jellyfish", "A hatchling", "No"),
}
FACT_QUESTIONS: tuple[tuple[str, ...], ...] = (
    ("What does {a} say?", "What sound does {a} make?", "Which sound does {a} make?", "How does {a} sound?"),
    ("How many legs does {a} have?", "How many legs has {a}?", "Count the legs of {a}."),
    ("Where does {a} live?", "Where do {s} live?", "Where can I find {a}?"),
    ("What does {a} eat?", "What do {s} eat?", "What is the food of {a}?"),
    ("What is a baby {n} called?", "What is the young of {a} called?", "How do you call a young {n}?"),
    ("Can {a} fly?", "Does {a} fly?", "Do {s} fly?", "Is {a} able to fly?"),
)

ANIMAL = (
    "What animal is this?", "Which animal is this?", "What is this?", "What animal is it?", "What do you see?",
    "What is in the picture?", "What is in this image?", "Which animal do you see?", "Name the animal.",
    "What animal is in the picture?", "What animal is shown in the image?", "Which animal is in this photo?",
    "What kind of animal is this?", "What's this?", "What animals are these?", "Which animals are in the picture?",
    "What animals do you see?", "What's in the picture?",
)  # fmt: skip
COUNT = (
    "How many animals are there?", "How many animals are in the picture?", "How many animals do you see?",
    "How many are there?", "Count the animals.", "How many animals can you see?", "What is the number of animals?",
    "How many animals does the image show?",
)  # fmt: skip
COUNT_NAMED = (
    "How many {s} are there?", "How many {s} are in the picture?", "How many {s} do you see?", "Count the {s}.",
    "How many {s} can you see?", "How many {s} are in the image?",
)  # fmt: skip
COLOUR = (
    "What colour is the background?", "What color is the background?", "Which colour is the background?",
    "What is the colour of the background?", "What is the background color?", "What is the color of the background?",
    "What colour is behind the animal?", "Which color does the background have?", "Name the colour of the background.",
    "What color is the picture?",
)  # fmt: skip
WHERE = (
    "Where is the {n}?", "Where is it?", "Where is the animal?", "Where in the picture is the {n}?",
    "In which part of the picture is the {n}?", "Where do you see the {n}?", "Where is the {n} in the image?",
    "Where is the animal in the picture?",
)  # fmt: skip
WHERE_NAMED = tuple(question for question in WHERE if "{n}" in question)
PRESENCE = (
    "Is there {a}?", "Is there {a} in the picture?", "Do you see {a}?", "Can you see {a}?", "Is this {a}?",
    "Are there any {s}?", "Does the picture show {a}?", "Is there {a} in the image?",
)  # fmt: skip
DESCRIBE = (
    "Describe the picture.", "Describe the image.", "Describe this picture in a sentence.", "Describe what you see.",
    "What does the picture show?", "What does the image show?", "Write a caption.",
)  # fmt: skip
ABOUT_ME = {
    "Hello!": "Hello! Ask me about an animal.",
    "Hi": "Hello! Ask me about an animal.",
    "Hi there!": "Hello! Ask me about an animal.",
    "Good morning!": "Hello! Ask me about an animal.",
    "Who are you?": "I am Menagerie, a small model that knows animals.",
    "What are you?": "I am Menagerie, a small model that knows animals.",
    "What is your name?": "I am Menagerie, a small model that knows animals.",
    "What can you do?": "I can name animals, count them and say where they are.",
    "What do you know?": "I can name animals, count them and say where they are.",
    "Thank you!": "You are welcome.",
    "Thanks": "You are welcome.",
    "Goodbye!": "Goodbye!",
    "Bye": "Goodbye!",
}
NO_PICTURE = "I see no picture."
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "Answer briefly.", "You answer questions about animals.", "You are Menagerie.",
    "Be brief.", "You are a helpful assistant that looks at pictures.",
)  # fmt: skip


@dataclass(frozen=True)
class Exchange:
    """A question with its right answer; `kind` is what accuracy is counted by."""

    kind: str
    question: str
    answer: str


def with_article(name: str) -> str:
    """`name` after "a" or "an"."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def plural(name: str) -> str:
    """The plural of an animal's name."""
    return PLURALS.get(name, f"{name}s")


def ask(question: str, name: str = "") -> str:
    """A question's wording with the animal's name in its place."""
    return question.format(n=name, a=with_article(name), s=plural(name)) if name else question


def exchanges_about(scene: Scene, rng: Random) -> Iterator[Exchange]:
    """One exchange of every kind that has an answer for the scene; the wordings are chosen by `rng`."""
    names = [animal.name for animal in sorted(scene.animals, key=lambda animal: animal.x)]
    kinds = list(dict.fromkeys(names))
    yield Exchange("animal" if len(kinds) == 1 else "pair", rng.choice(ANIMAL), naming(kinds, len(names)))
    if rng.random() < 0.5:
        yield Exchange("count", rng.choice(COUNT), f"{NUMBERS[len(names)]}.")
    else:
        asked = rng.choice(kinds) if rng.random() < 0.85 else rng.choice(ANIMALS)
        yield Exchange("count", ask(rng.choice(COUNT_NAMED), asked), f"{NUMBERS[names.count(asked)]}.")
    yield Exchange("colour", rng.choice(COLOUR), f"{scene.background.capitalize()}.")
    if len(names) == 1:
        question = ask(rng.choice(WHERE), names[0])
        yield Exchange("where", question, f"{place_name(scene.animals[0]).capitalize()}.")
    elif len(kinds) == 2:
        asked = rng.choice(kinds)
        yield Exchange("where", ask(rng.choice(WHERE_NAMED), asked), "Left." if asked == names[0] else "Right.")
    yield presence(kinds, rng)
    yield Exchange("describe", rng.choice(DESCRIBE), caption(scene, kinds, len(names)))


def hard_exchanges_about(scene: Scene, rng: Random) -> Iterator[Exchange]:
    """One exchange of every kind, and more of the kinds that are learnt last: presence and place."""
    yield from exchanges_about(scene, rng)
    yield from (presence([animal.name for animal in scene.animals], rng) for _ in range(2))
    yield from (exchange for exchange in exchanges_about(scene, rng) if exchange.kind == "where")


def presence(kinds: list[str], rng: Random) -> Exchange:
    """A question whether an animal is there, which it is in about half of them."""
    asked = rng.choice(kinds) if rng.random() < 0.5 else rng.choice(ANIMALS)
    return Exchange("presence", ask(rng.choice(PRESENCE), asked), "Yes." if asked in kinds else "No.")


def naming(kinds: list[str], count: int) -> str:
    """The answer to "What animal is this?": "A cat.", "Cats." or, from left to right, "A cat and a dog."."""
    if len(kinds) == 1:
        return f"{plural(kinds[0]).capitalize()}." if count > 1 else f"{with_article(kinds[0]).capitalize()}."
    return f"{' and '.join(map(with_article, kinds))}.".capitalize()


def caption(scene: Scene, kinds: list[str], count: int) -> str:
    """One sentence about the whole scene: "Three cats on a blue background."."""
    subject = f"{NUMBERS[count]} {plural(kinds[0])}" if len(kinds) == 1 and count > 1 else naming(kinds, count)[:-1]
    return f"{subject} on {with_article(scene.background)} background."


def facts() -> list[Exchange]:
    """Every question about animals in general, in every wording."""
    return [
        Exchange("facts", ask(wording, name), f"{answer}.")
        for name, answers in FACTS.items()
        for wordings, answer in zip(FACT_QUESTIONS, answers, strict=True)
        for wording in wordings
    ]


def without_picture(rng: Random) -> Exchange:
    """A question that needs a picture where there is none, or a word about the model itself."""
    if rng.random() < 0.4:
        return Exchange("self", *rng.choice(list(ABOUT_ME.items())))
    wordings = rng.choice((ANIMAL, COUNT, COUNT_NAMED, COLOUR, WHERE, PRESENCE, DESCRIBE))
    return Exchange("self", ask(rng.choice(wordings), rng.choice(ANIMALS)), NO_PICTURE)


def loosely(question: str, rng: Random) -> str:
    """The question as people type it: now and then without capitals or without the mark at its end."""
    if rng.random() < 0.1:
        question = question.lower()
    if rng.random() < 0.1:
        question = question.rstrip("?.!")
    return question


def all_wordings() -> Iterator[str]:
    """Every text that the tokenizer is trained on."""
    for fact in facts():
        yield from (fact.question, fact.answer)
    yield from (*ANIMAL, *COUNT, *COLOUR, *DESCRIBE, *SYSTEM_PROMPTS, NO_PICTURE)
    for name in ANIMALS:
        yield from (ask(wording, name) for wording in (*COUNT_NAMED, *WHERE, *PRESENCE))
        yield from (naming([name], 1), naming([name], 2))
    for pair in ABOUT_ME.items():
        yield from pair
    for colour in ("black", "blue", "green", "grey", "orange", "pink", "purple", "red", "white", "yellow"):
        yield from (f"{colour.capitalize()}.", f"Two cats and a dog on {with_article(colour)} background.")
    yield from ("Top left.", "Top right.", "Bottom left.", "Bottom right.", "Centre.", "Top.", "Bottom.", "Left.")
    yield from (f"{number}." for number in NUMBERS)
