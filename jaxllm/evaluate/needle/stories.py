"""Word lists for texts of the demo models' training grammar (scripts/demo_models/story_grammar.py).

The demo models learned to copy names, so the fact is a friend's name, introduced once and asked for
at the end. The hero is a girl and the friend a boy, since in the grammar the two always differ. The
sentences in between name nobody, except in texts with several facts (`MEETING`).
"""

from random import Random

FRIENDS = (
    "Ben", "Tom", "Max", "Leo", "Sam", "Finn", "Otto", "Jack", "Theo", "Milo", "Hugo", "Oscar",
    "Felix", "Toby", "Jonah", "Arlo", "Rufus", "Gus", "Emil", "Noah", "Kofi", "Ravi", "Omar",
    "Diego",
)  # fmt: skip
HEROES = ("Mia", "Lily", "Zoe", "Nora", "Ruby", "Clara", "Ivy", "Rosa", "Luna", "Hazel", "Anna")
KINDS = ("fox", "rabbit", "bear", "mouse", "hedgehog", "squirrel", "badger", "kitten", "panda")
TRAITS = ("curious", "cheerful", "quiet", "brave", "clever", "gentle", "busy", "playful", "merry")
PAL_TRAITS = ("friendly", "patient", "funny", "thoughtful", "helpful", "jolly", "wise", "polite")
HOMES = (
    "in a small cottage by the river", "in a round house on a green hill",
    "at the edge of a sleepy village", "in a blue house near the sea",
    "on a small farm between two hills", "in a wooden house beside a lake",
)  # fmt: skip
HABITS = (
    "hum old songs", "collect round stones", "watch the boats go by", "ask questions",
    "draw pictures in the mud", "jump over puddles", "tell long jokes", "look at the stars",
    "build towers out of sticks", "make up silly songs", "count the clouds", "run down the hill",
)  # fmt: skip
MOODS = (
    "the leaves whispered", "the waves rolled in", "it smelled of plums", "the flowers nodded",
    "the apples shone", "the bees hummed", "the gulls cried", "the grass was tall",
    "the water was still", "it was very quiet", "the sand was warm", "the clock ticked",
)  # fmt: skip
PLACES = ("the park", "the forest", "the beach", "the market", "the meadow", "the orchard")

OPENING = "Once upon a time there was a {trait} {kind} named {hero} who lived {home}."
FACT = "Her best friend was {answer}, a {pal_trait} {pal_kind} from across the road."
FILLERS = (
    "She loved to {habit}.",
    "In summer she liked to {habit}, and in winter she liked to sleep.",
    "When there was nothing to do, she liked to {habit}.",
    "It was a fine day, and {mood}.",
    "It was a bright day, and {mood}.",
    "Everything was peaceful, and {mood}.",
    "One morning, she walked all the way to {place}.",
    "One quiet Sunday, she decided to spend some hours at {place}.",
    "The sun was shining.",
    "A light breeze was blowing.",
    "Somewhere a bird was singing.",
    "The sky was clear and blue.",
)
QUESTION = '\n\n"Thank you,'

# Texts with several facts: each kind of animal is met once and has its own name.
MEETING = "By the road stood the {kind} {name}."
MEETING_QUESTION = " Who came back? It was the {kind}"


def filler(rng: Random) -> str:
    """Return a random sentence that names nobody."""
    return rng.choice(FILLERS).format(
        habit=rng.choice(HABITS), mood=rng.choice(MOODS), place=rng.choice(PLACES)
    )
