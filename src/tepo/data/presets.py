"""The data sets that have a name of their own: one row each."""

from dataclasses import dataclass, field

from tepo.config.data import Columns

BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
HASHES = "Please reason step by step, and write the final answer on a last line after ####."


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set on the Hugging Face hub, and which column holds what."""

    id: str
    split: str
    columns: Columns
    subset: str | None = None
    boxed: bool = False
    """The answer column is a worked solution whose last box is the answer."""


@dataclass(frozen=True)
class Preset:
    """A named data set. `test=None`: a part of the training split is held out."""

    train: HubSplit
    test: HubSplit | None
    licence: str
    instruction: str | None = BOXED
    verifier: str = "math"
    template: str = "auto"
    deduplicate: bool = False
    """The hub's copy repeats its rows: keep the first of each question."""
    wrapping: tuple[str, str] = field(default=("", ""))
    """What the data set itself puts before and after each question; taken off, for our own instruction."""


_GSM8K = Columns(problem="question", answer="answer")
_MATH_500 = HubSplit("HuggingFaceH4/MATH-500", "test", Columns(problem="problem", answer="answer", id="unique_id"))
_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'

PRESETS: dict[str, Preset] = {
    "gsm8k": Preset(
        train=HubSplit("openai/gsm8k", "train", _GSM8K, subset="main"),
        test=HubSplit("openai/gsm8k", "test", _GSM8K, subset="main"),
        licence="MIT, Copyright (c) 2021 OpenAI",
        instruction=HASHES,
    ),
    "math": Preset(
        train=HubSplit(
            "DigitalLearningGmbH/MATH-lighteval", "train", Columns(problem="problem", answer="solution"), boxed=True
        ),
        test=_MATH_500,
        licence="MIT, Copyright (c) 2021 Dan Hendrycks",
    ),
    "dapo-math-17k": Preset(
        train=HubSplit(
            "BytedTsinghua-SIA/DAPO-Math-17k", "train", Columns(problem="prompt", answer="reward_model.ground_truth")
        ),
        test=HubSplit("HuggingFaceH4/aime_2024", "train", Columns(problem="problem", answer="answer")),
        licence="Apache-2.0 (the collection; the problems belong to their contests)",
        deduplicate=True,
        wrapping=(_DAPO_BEFORE, _DAPO_AFTER),
    ),
}
