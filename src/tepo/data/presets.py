"""The data sets that have a name of their own: one row each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tepo.config.data import Columns
from tepo.data.problem import Protocol

BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
HASHES = "Please reason step by step, and write the final answer on a last line after ####."
EXPRESSION = "Think step by step, and give the expression alone between <answer> and </answer>."

GREEDY = Protocol(samples=1, temperature=0.0)
AVG_32 = Protocol(samples=32, temperature=0.6)
"""Of small contests: one greedy answer to 30 problems says little."""


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set on the Hugging Face hub, and which column holds what."""

    id: str
    split: str
    columns: Columns
    subset: str | None = None
    boxed: bool = False
    """The answer column is a worked solution whose last box is the answer."""
    question: Callable[[Mapping[str, Any]], str] | None = None
    """Makes the question from a row, where no column holds one."""


@dataclass(frozen=True)
class Preset:
    """A named data set. `train=None`: a benchmark, nothing to train on. `test=None`: a part of `train` is held out."""

    train: HubSplit | None
    test: HubSplit | None
    licence: str
    instruction: str | None = BOXED
    verifier: str = "math"
    template: str = "auto"
    protocol: Protocol = GREEDY
    deduplicate: bool = False
    """The hub's copy repeats its rows: keep the first of each question."""
    skip_unanswered: bool = False
    """The hub's copy has rows without an answer: leave them out, with a count."""
    wrapping: tuple[str, str] = field(default=("", ""))
    """What the data set itself puts before and after each question; taken off, for our own instruction."""


def _countdown_question(row: Mapping[str, Any]) -> str:
    numbers = ", ".join(map(str, row["nums"]))
    return (
        f"Make an expression that is worth {row['target']} from the numbers {numbers}. "
        f"Use each number exactly once, the signs + - * / and brackets."
    )


def _benchmark(split: HubSplit, licence: str, **more: Any) -> Preset:
    return Preset(train=None, test=split, licence=licence, **more)


_QUESTION = Columns(problem="question", answer="answer")
_PROBLEM = Columns(problem="problem", answer="answer")
_MATH_500 = HubSplit("HuggingFaceH4/MATH-500", "test", Columns(problem="problem", answer="answer", id="unique_id"))
_AIME_24 = HubSplit("HuggingFaceH4/aime_2024", "train", _PROBLEM)
_CONTEST = "no licence stated; the problems belong to their contests"
_MATH_LICENCE = "MIT, Copyright (c) 2021 Dan Hendrycks"
_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'

PRESETS: dict[str, Preset] = {
    "gsm8k": Preset(
        train=HubSplit("openai/gsm8k", "train", _QUESTION, subset="main"),
        test=HubSplit("openai/gsm8k", "test", _QUESTION, subset="main"),
        licence="MIT, Copyright (c) 2021 OpenAI",
        instruction=HASHES,
    ),
    "math": Preset(
        train=HubSplit(
            "DigitalLearningGmbH/MATH-lighteval", "train", Columns(problem="problem", answer="solution"), boxed=True
        ),
        test=_MATH_500,
        licence=_MATH_LICENCE,
    ),
    "dapo-math-17k": Preset(
        train=HubSplit(
            "BytedTsinghua-SIA/DAPO-Math-17k", "train", Columns(problem="prompt", answer="reward_model.ground_truth")
        ),
        test=_AIME_24,
        licence="Apache-2.0 (the collection; the problems belong to their contests)",
        protocol=AVG_32,
        deduplicate=True,
        wrapping=(_DAPO_BEFORE, _DAPO_AFTER),
    ),
    "deepscaler": Preset(
        train=HubSplit("agentica-org/DeepScaleR-Preview-Dataset", "train", _PROBLEM),
        test=_AIME_24,
        licence="MIT (the collection; the problems belong to their contests)",
        protocol=AVG_32,
        deduplicate=True,
        skip_unanswered=True,
    ),
    "countdown": Preset(
        train=HubSplit(
            "Jiayi-Pan/Countdown-Tasks-3to4",
            "train",
            Columns(problem="nums", answer="target"),
            question=_countdown_question,
        ),
        test=None,
        licence="Apache-2.0 (TinyZero, which made it)",
        instruction=EXPRESSION,
        verifier="countdown",
        deduplicate=True,
    ),
    "math500": _benchmark(_MATH_500, _MATH_LICENCE),
    "aime24": _benchmark(_AIME_24, _CONTEST, verifier="integer", protocol=AVG_32),
    "aime25": _benchmark(HubSplit("math-ai/aime25", "test", _PROBLEM), _CONTEST, verifier="integer", protocol=AVG_32),
    "amc23": _benchmark(HubSplit("math-ai/amc23", "test", _QUESTION), _CONTEST, protocol=AVG_32),
    "minerva": _benchmark(
        HubSplit("math-ai/minervamath", "test", _QUESTION), "no licence stated; from MIT OpenCourseWare"
    ),
    "olympiadbench": _benchmark(
        HubSplit(
            "Hothan/OlympiadBench",
            "train",
            Columns(problem="question", answer="final_answer", id="id"),
            subset="OE_TO_maths_en_COMP",
        ),
        "Apache-2.0 as stated on the hub; the problems belong to their contests",
    ),
    "omni-math": _benchmark(
        HubSplit("KbsdJames/Omni-MATH", "test", _PROBLEM),
        "Apache-2.0 as stated on the hub; the problems belong to their contests",
        skip_unanswered=True,
    ),
    "college-math": _benchmark(
        HubSplit("di-zhang-fdu/College_Math_Test", "test", _QUESTION),
        "of nine textbooks, each under its own licence, some non-commercial",
        skip_unanswered=True,
    ),
    "gaokao2023en": _benchmark(
        HubSplit("MARIO-Math-Reasoning/Gaokao2023-Math-En", "train", _QUESTION), _CONTEST, skip_unanswered=True
    ),
}
