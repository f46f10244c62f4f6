"""The demo's five questions, from a few tokens to several prefill chunks."""

from dataclasses import dataclass

STORY = """\
The lighthouse at Carrow Point was built in 1871 by two brothers, Edmund and Isaac Vane, who had \
never built anything taller than a barn. The first winter took the scaffold, the second took the \
crane, and the third took Isaac, who slipped from the ladder and was found at low tide. Edmund \
finished the tower alone. He cut the last of its 168 steps in the spring of 1874, lit the lamp on \
the first of May, and kept it for thirty-one years.

The keepers' log, which is complete but for one page, records what the sea brought. In 1880 it was \
a crate of oranges; in 1887, a piano without its lid, which still stands in the school; in 1893, a \
dog that answered to no name and stayed for eleven years. The log also records what the sea took: \
four boats, a jetty, the lower meadow, and, one night in November 1898, the road to the village.

When Edmund grew old his niece Harriet came to help. She was nineteen, read Latin, and disliked \
fish. She learned the lamp in a week and the weather in a year. It was Harriet who noticed that \
the fog came earlier when the herons stood on the north rocks, and who wrote to the Board to \
propose a bell. The Board answered after two years, and the answer was no. She bought a bell from \
a church that was being pulled down, hung it from the gallery with the help of the baker and his \
sons, and rang it by hand. In its first winter it brought in three boats that would have been lost.

In 1905 Edmund died in his chair, facing the window. Harriet kept the light for another \
thirty-four years. She took no holiday, since there was nobody to leave the lamp to, but each \
midsummer she invited the whole village up the 168 steps, and at the top there was bread, cheese \
and a view as far as the islands. The children were allowed to polish the brass. It is said that \
no child of Carrow Point was ever afraid of the dark.

The electric lamp came in 1939, and with it a man from the Board, who measured the tower, weighed \
the bell and asked Harriet for the missing page of the log. She said that she had never seen it. \
The lamp needed no keeper any more, and the Board gave her a clock. She moved to a house below the \
point from which the light could be seen, and on nights of fog she still climbed the steps and \
rang the bell, because the electric lamp, as she told the baker's grandson, could not hear herons.

The page was found in 1962, when the piano was tuned. It had been folded small and put between the \
strings. In Edmund's hand it told of the night when Isaac died: that the two had quarrelled over \
the height of the tower, that Isaac had wanted one hundred steps and Edmund two hundred, and that \
after the funeral Edmund had counted his brother's age in weeks, divided it by ten, rounded it, \
and built the number that came out. Beneath it, in Harriet's hand, stood one line: he never told \
anybody, and neither shall I, but the piano may.

Today the tower belongs to the village. The bell is rung once a year, at midsummer, by whoever is \
the youngest that can lift the rope. The herons still stand on the north rocks before fog, and the \
harbour master, who owns three instruments that measure moisture in the air, looks at them first.\
"""


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One question."""

    title: str
    content: str
    max_tokens: int
    long: bool = False
    """Must be disaggregated wherever there is a prefill worker."""


DEMO_PROMPTS = (
    DemoPrompt("greeting", "Say hello in one sentence.", 24),
    DemoPrompt("fact", "What is the capital of France?", 24),
    DemoPrompt(
        "explanation",
        "Explain to a curious ten-year-old why the sky is blue at noon and red in the evening, "
        "in two or three sentences, with one everyday comparison. Then name one other thing in "
        "nature that gets its colour in the same way, and say in a few words how you know. Avoid "
        "formulas, keep the sentences short, and end on a question that the child can try to "
        "answer by looking out of the window tomorrow morning.",
        64,
    ),
    DemoPrompt(
        "half a story",
        f"Continue this story with one sentence.\n\n{STORY[: len(STORY) // 3]}",
        48,
    ),
    DemoPrompt("long story", f"{STORY}\n\nWho was Harriet, and what did she do?", 64, long=True),
)
