"""The sections `data` and `reward` of a recipe: which problems, and what a response to one is worth."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tepo.config.base import Section


class Columns(Section):
    """Which column of a data set holds what. A dot reaches into a record (`reward_model.ground_truth`)."""

    problem: str = Field("problem", description="column with the question: text, or a list of chat messages")
    answer: str = Field("answer", description="column with the gold answer")
    id: str | None = Field(None, description="column with the row's name; otherwise rows are numbered")


class DataConfig(Section):
    """Where problems come from and how they become prompts."""

    name: str = Field(
        "arithmetic",
        description="a built-in task, a preset (`tepo recipes` lists both), `gym:TASK` (reasoning-gym), "
        "a .jsonl, .json or .parquet file, or a data set id of the Hugging Face hub",
    )
    file: str | None = Field(
        None, description="local file to read a preset's training problems from, in place of the hub"
    )
    test_file: str | None = Field(None, description="local file with the held-out problems")
    split: str = Field("train", description="split of a hub data set to train on")
    test_split: str | None = Field("test", description="split of a hub data set held out for evaluation")
    subset: str | None = Field(None, description="configuration name of a hub data set")
    columns: Columns | None = Field(None, description="column mapping; a preset brings its own")
    template: str = Field(
        "auto",
        description="`chat` (the model's chat template), `plain` (the problem alone), or a text containing {problem}; "
        "`auto` takes the task's own",
    )
    system: str | None = Field(None, description="system message put before the problem (chat template only)")
    instruction: str | None = Field(
        None, description="text added after the problem, on a line of its own; a preset may bring one"
    )
    max_problems: int | None = Field(None, ge=1, description="use only the first so many training problems")
    test_problems: int = Field(200, ge=1, description="at most so many held-out problems, for evaluation")
    max_prompt_tokens: int = Field(1024, ge=1, description="longer prompts are dropped, with a count")
    options: dict[str, Any] = Field(default_factory=dict, description="parameters of a generated task")


class FormatReward(Section):
    """A bonus for responses that have the wanted form, whatever their answer."""

    pattern: str = Field(
        r"\\boxed\{.+\}", description="regular expression searched for in the response (dot matches newlines)"
    )
    score: float = Field(0.1, description="added when the pattern is found")


class OverlongPunishment(Section):
    """DAPO's soft overlong punishment (2503.14476, equation 13), in response tokens."""

    max_length: int = Field(20480, ge=1, description="from this length on the punishment is -1")
    cache: int = Field(4096, ge=1, description="the punishment grows over so many tokens before max_length")


class RewardConfig(Section):
    """How a verdict becomes a reward."""

    verifier: str = Field(
        "auto",
        description="`math`, `integer`, `countdown` (every number once), `countdown_any` (some may be left out), "
        "`exact`, `gym`, or your own `module:function`; `auto` takes the task's own",
    )
    correct: float = Field(1.0, description="score of a correct answer (Tulu 3: 10; DAPO: 1)")
    wrong: float = Field(0.0, description="score of every other answer (DAPO: -1)")
    partial: bool = Field(False, description="use a verifier's partial score: wrong + score * (correct - wrong)")
    process: str = Field(
        "auto",
        description="process reward model, for objectives that read one (prpo): your own `module:function`; `auto` "
        "takes the task's own, which `arithmetic` alone has",
    )
    missing_end: float | None = Field(None, description="reward of a response without an end token (Tulu 3: -10)")
    format: FormatReward | None = None
    overlong: OverlongPunishment | None = None
    timeout: float = Field(5.0, gt=0, description="seconds of processor time that one answer may take to judge")
    memory_mb: int = Field(2048, ge=256, description="memory that a judging process may take, in MiB")
    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="judging processes; `auto` is one a core, at most 8"
    )
