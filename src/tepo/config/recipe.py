"""Everything that a recipe can set, in one model; what stands here and nowhere else is a key."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from tepo.config.base import Section
from tepo.config.data import DataConfig, RewardConfig
from tepo.config.verl import VerlConfig
from tepo.objectives import Objective, get_objective

Beta = Annotated[float, Field(ge=0, lt=1)]


class ObjectiveConfig(Section):
    """`objective: NAME`, or `objective: {name: NAME, ...}` with the options of `tepo.objectives.get_objective`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field("tepo", description="a name from `tepo objectives`, or your own `module:attribute`")

    @model_validator(mode="after")
    def _exists(self) -> Self:
        self.build()
        return self

    def build(self) -> Objective:
        """The objective itself. Raises ValueError for names and options that it does not take."""
        return get_objective(self.name, **(self.model_extra or {}))


class LoraConfig(Section):
    """Low-rank adapters (peft) in place of full fine-tuning."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    targets: str | list[str] = Field("all-linear", description="names of the modules to adapt, or `all-linear`")


class ModelConfig(Section):
    """The model to train, and how it is held."""

    name: str = Field(
        "embedded", description="`embedded`, `smollm2` (extra smollm2), a folder in Hugging Face format, or a hub id"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="precision of the arithmetic; weights and optimizer stay fp32, so that small updates count"
    )
    lora: LoraConfig | None = None
    gradient_checkpointing: bool | Literal["elementwise"] = Field(
        False,
        description="compute layers again in the backward pass: true keeps their inputs alone, `elementwise` also the "
        "results of matrix products and attention, so that only cheap operations are repeated",
    )
    trust_remote_code: bool = False
    device: str = Field("auto", description="`auto`, `cpu`, `cuda`, ...")


class RolloutConfig(Section):
    """How responses are sampled for training."""

    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="`transformers` decodes with the model that is trained; `vllm` (extra vllm)"
    )
    max_response_tokens: int = Field(
        512, ge=1, description="a response of this length without an end token is truncated"
    )
    temperature: float = Field(1.0, gt=0, description="applied when sampling and in the log-probs of the ratio alike")
    top_p: float = Field(1.0, gt=0, le=1)
    batch_size: int = Field(256, ge=1, description="responses decoded at once, at most")
    cache_tokens: int = Field(
        2**17,
        ge=2,
        description="prompt and response tokens that the key-value cache holds: as many responses are decoded at once "
        "as fit in it at full length",
    )
    stop: list[str] = Field(default_factory=list, description="strings that end a response, as an end token does")
    correction: Literal["none", "truncated", "mask"] = Field(
        "none",
        description="for the difference between sampling and scoring: `truncated` weighs tokens by min(scored/sampled, "
        "correction_cap), `mask` leaves out responses whose likelihoods differ by more than that factor",
    )
    correction_cap: float = Field(2.0, gt=1)
    save_tokens: int | None = Field(
        1,
        ge=1,
        description="keep the token ids, log-probs and entropies of every so-many-th rollout, 16 bytes a token; "
        "`tepo inspect` reads them, and the report measures by them how far the policy has moved",
    )
    vllm_server: str | None = Field(
        None,
        pattern=r"^https?://",
        description="vllm: address of a server to sample with, http://host:port; without it vLLM runs in this process",
    )
    vllm_memory: float = Field(
        0.4, gt=0, le=1, description="vllm: share of the device's memory for its weights and cache"
    )
    vllm_max_length: int | None = Field(
        None, ge=2, description="vllm: longest prompt and response; the data's and the rollout's limits when not given"
    )

    @model_validator(mode="after")
    def _server_is_of_vllm(self) -> Self:
        if self.vllm_server is not None and self.engine != "vllm":
            raise ValueError(
                f"vllm_server is given and engine is {self.engine}; only engine=vllm samples with a server"
            )
        return self

    @field_validator("stop")
    @classmethod
    def _no_empty_string(cls, value: list[str]) -> list[str]:
        if not all(value):
            raise ValueError("an empty string would end every response; texts of one character or more are allowed")
        return value

    @field_validator("top_p")
    @classmethod
    def _whole_distribution(cls, value: float) -> float:
        if value < 1:
            raise ValueError(
                "only 1.0 is possible in training: with less, the tokens come from a truncated distribution and the "
                "importance ratio would be silently wrong (evaluation.top_p may be smaller)"
            )
        return value


class TrainerConfig(Section):
    """The sizes of a run and its optimizer. One step is one optimizer step."""

    steps: int = Field(200, ge=1, description="optimizer steps in all")
    prompts_per_rollout: int = Field(16, ge=1)
    responses_per_prompt: int = Field(8, ge=1)
    updates_per_rollout: int = Field(
        4, ge=1, description="optimizer steps made from one rollout, each on its own prompts"
    )
    tokens_per_microbatch: int = Field(
        16384, ge=1, description="tokens in one forward pass: each prompt once, and its responses"
    )
    learning_rate: float = Field(1e-6, gt=0)
    critic_learning_rate: float | None = Field(
        None, gt=0, description="of the critic of PPO; ten times learning_rate when not given"
    )
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="after the warm-up, down to 0 at the last step"
    )
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    max_grad_norm: float = Field(1.0, gt=0, description="gradients with a larger norm are scaled down to it")
    dynamic_sampling: bool = Field(
        False,
        description="replace groups whose answers are all right or all wrong by new ones (on accuracy, not on reward)",
    )
    max_sampling_rounds: int = Field(8, ge=1, description="rollouts sampled at most to fill one under dynamic sampling")
    skip_limit: int = Field(
        10,
        ge=1,
        description="steps in a row whose loss or gradient is not finite (they are skipped) before a run stops",
    )
    stop_without_signal: int | None = Field(
        None, ge=1, description="stop after so many steps in a row in which all responses to a prompt earned the same"
    )
    overlong_filtering: bool = Field(False, description="leave truncated responses out of the loss")

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.prompts_per_rollout % self.updates_per_rollout:
            raise ValueError(
                f"prompts_per_rollout ({self.prompts_per_rollout}) must be a multiple of updates_per_rollout "
                f"({self.updates_per_rollout}): every update gets the same number of prompts"
            )
        return self


class EvaluationConfig(Section):
    """Held-out problems, answered before, during and after training."""

    every: int | None = Field(None, ge=1, description="evaluate after so many steps as well")
    samples: int = Field(1, ge=1, description="sampled responses to each problem")
    temperature: float | None = Field(None, gt=0, description="of the samples; the training temperature when not given")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="only from so many most likely tokens; 0 is all of them")
    greedy: bool = Field(True, description="give greedy accuracy beside the sampled one, at the start and the end")
    before: bool = True
    after: bool = True
    save_every: int = Field(
        64, ge=1, description="responses that tepo eval samples at once and then saves: an interruption loses so many"
    )


class CheckpointConfig(Section):
    """Checkpoints in Hugging Face format, with the trainer's state beside them. The last step is always saved."""

    every: int | None = Field(None, ge=1, description="save after so many steps as well")
    keep: int | None = Field(None, ge=1, description="keep only the newest so many")
    best: str | None = Field(
        None,
        description="and the one that is best by this metric of its step: one of metrics.jsonl, eval/accuracy or "
        "eval/greedy_accuracy",
    )
    smaller_is_better: bool = Field(False, description="of the metric `best`")
    background: bool = Field(
        True, description="write while the run goes on, from a copy in main memory (weights and optimizer state)"
    )

    @model_validator(mode="after")
    def _best_of_those_that_are_kept(self) -> Self:
        if self.best is not None and self.keep is None:
            raise ValueError("checkpoint.best has no meaning without checkpoint.keep: all checkpoints are kept")
        return self


class Recipe(Section):
    """One run, completely."""

    seed: int = Field(0, ge=0, lt=2**31)
    output: str = Field("runs/tepo", min_length=1, description="the run folder")
    objective: ObjectiveConfig = ObjectiveConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    verl: VerlConfig = VerlConfig()
    trackers: list[Literal["wandb", "trackio"]] = Field(
        default_factory=list, description="beside metrics.jsonl and TensorBoard, which are always written"
    )

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, values: Any) -> Any:
        """`objective: grpo` is `objective: {name: grpo}`; the same for model and data."""
        if isinstance(values, dict):
            values = {
                key: {"name": value} if key in SHORT_FORMS and isinstance(value, str) else value
                for key, value in values.items()
            }
        return values

    @model_validator(mode="after")
    def _groups_are_large_enough(self) -> Self:
        if self.trainer.responses_per_prompt < 2 and self.objective.build().advantage.relative_to_group:
            raise ValueError(
                f"trainer.responses_per_prompt is 1: objective {self.objective.name} compares a response with its "
                "group and needs at least 2"
            )
        return self

    @model_validator(mode="after")
    def _process_rewards_come_from_somewhere(self) -> Self:
        reads = "process_reward" in self.objective.build().advantage.needs
        if reads and self.reward.process == "auto" and self.data.name != "arithmetic":
            raise ValueError(
                f"reward.process is auto: objective {self.objective.name} needs a process reward model, and data "
                f"{self.data.name!r} has none of its own; name yours as module:function"
            )
        if self.reward.process != "auto" and not reads:
            raise ValueError(
                f"reward.process is {self.reward.process!r}, which objective {self.objective.name} does not read"
            )
        return self

    @model_validator(mode="after")
    def _one_way_to_treat_truncation(self) -> Self:
        if self.trainer.overlong_filtering and self.reward.overlong:
            raise ValueError(
                "trainer.overlong_filtering and reward.overlong are both set: truncated responses are either left "
                "out of the loss or punished"
            )
        if self.trainer.overlong_filtering and self.reward.missing_end is not None:
            raise ValueError(
                "trainer.overlong_filtering and reward.missing_end are both set: truncated responses are either left "
                "out of the loss or punished"
            )
        return self


SHORT_FORMS = ("objective", "model", "data")
