"""TRL's GRPOTrainer with an objective of ours in the place of its loss.

    from tepo.integrations.trl import ObjectiveTrainer, verdict_reward

    trainer = ObjectiveTrainer(model, verdict_reward("math"), GRPOConfig(num_iterations=2), train_dataset=data,
                               objective="tepo")
    trainer.train()

Generation, rewards, the forward pass, the reference model, accelerate and PEFT stay TRL's. Ours are the advantages, the
loss, and what it is divided by: the tokens of the whole optimizer step, over accumulation and processes. Entropies are
kept with the old log-probs, for the objectives that compare them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from tepo.integrations.rewards import verdict_reward
from tepo.integrations.versions import check_version
from tepo.objectives import Objective, TokenBatch, Totals, at_rollout, combine_metrics, get_objective

check_version("trl", "1.16.")

from trl import GRPOConfig, GRPOTrainer  # noqa: E402

__all__ = ["ObjectiveTrainer", "verdict_reward"]

OF_THE_LOSS = (
    "loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "top_entropy_quantile",
    "entropy_coef", "use_adaptive_entropy", "off_policy_mask_threshold", "scale_rewards",
    "multi_objective_aggregation", "use_liger_kernel", "beta",
)  # fmt: skip
"""Settings of GRPOConfig that belong to TRL's loss and advantages: the objective's here, to be left alone."""

GIVEN = frozenset({"logp", "old_logp", "entropy", "entropy_gradient", "old_entropy", "ref_logp", "selected"})
"""What an objective can read here."""

FORWARD = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
"""What a forward pass is given beside the tokens, where a model has it."""

STATE_FILE = "tepo_objective.json"


class ObjectiveTrainer(GRPOTrainer):  # type: ignore[misc, unused-ignore]
    """GRPOTrainer with `objective`: an Objective, or a name and its `options` (those of `get_objective`).

    Raises ValueError for an objective that reads what TRL does not give (a critic, pairs, ...), for settings of TRL's
    own loss, which would be without effect, and for an accumulation window that reaches beyond one generation, whose
    tokens could not be counted before its first backward pass.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *positional: Any,
        objective: str | Objective = "tepo",
        options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        named_one = objective if isinstance(objective, Objective) else get_objective(objective, **(options or {}))
        self.objective: Objective = named_one
        args = GRPOConfig("tepo") if args is None else args
        check_settings(args, named_one)
        self._window_left = 0
        self._window_totals: Totals | None = None
        self._window_metrics: list[tuple[dict[str, float], int]] = []
        self._scored: list[tuple[Tensor, Tensor]] | None = None
        self._rewards: Tensor | None = None
        before, args.beta = args.beta, float(named_one.needs_reference)  # has TRL keep a reference; ours is the weight
        try:
            super().__init__(model, reward_funcs, args, *positional, **named)
        finally:
            args.beta = before
        if named_one.needs_whole_step and self.accelerator.num_processes > 1:
            raise ValueError(f"objective {named_one.name} looks at the whole step at once: one process is possible")

    # What TRL generates, with the advantages of the objective and the entropies of the policy that sampled.

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._scored is None or model is self.ref_model:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs | {"compute_entropy": True})
        self._scored.append(found[:2])
        return found

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        per_function: Tensor = super()._calculate_rewards(*args, **kwargs)
        weighed = (per_function * self.reward_weights.to(per_function.device)).nansum(dim=1)
        self._rewards = weighed.masked_fill(per_function.isnan().all(dim=1), torch.nan)
        return per_function

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._scored = []
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            old = output.get("old_per_token_logps")
            if old is None and self.objective.advantage.needs:
                with torch.no_grad():
                    old, entropies = self._score(self.model, output)[:2]
                output |= {"old_per_token_logps": old, "old_entropies": entropies}
            elif old is not None:
                output["old_entropies"] = next(entropy for logps, entropy in self._scored if logps is old)
        finally:
            self._scored = None
        self._fill_in_advantages(output)
        return output

    def _fill_in_advantages(self, output: dict[str, Any]) -> None:
        """`advantages` [B] or [B, T] and `groups` [B], in the place of TRL's."""
        assert self._rewards is not None
        rewards, mask = self._rewards, loss_mask(output)
        size = self.num_generations if self.model.training else self.num_generations_eval
        groups = torch.arange(len(rewards), device=rewards.device) // size
        here = slice(self.accelerator.process_index * len(mask), (self.accelerator.process_index + 1) * len(mask))
        output["groups"] = groups[here]
        scored = ~rewards.isnan()
        if self.objective.advantage.relative_to_group:
            scored &= torch.bincount(groups, weights=scored.double())[groups] > 1  # one alone has no baseline
        if self.objective.advantage.needs:
            output["advantages"] = self._token_advantages(output, rewards[here], scored[here], size)
            return
        lengths = self.accelerator.gather(mask.sum(1))
        advantages = torch.zeros_like(rewards)
        advantages[scored] = self.objective.advantages(rewards[scored], groups[scored], lengths[scored])
        output["advantages"] = advantages[here]
        shown = self._logs["advantages"]
        for i, value in enumerate(advantages.tolist(), start=len(shown) - len(advantages)):
            shown[i] = value

    def _token_advantages(self, output: dict[str, Any], rewards: Tensor, scored: Tensor, size: int) -> Tensor:
        """[B, T], of an objective whose advantages are made of the old policy's scores."""
        if len(rewards) % size:
            raise ValueError(
                f"objective {self.objective.name} makes its advantages of a group's tokens: the responses that a "
                f"process generates, {len(rewards)}, must be a multiple of num_generations, {size}"
            )
        old, mask = output["old_per_token_logps"], loss_mask(output).bool()
        rows = torch.nonzero(scored).flatten()
        batch = TokenBatch.from_padded(
            old[rows], old[rows], mask[rows], rewards=rewards[rows], groups=output["groups"][rows],
            old_entropy=output["old_entropies"][rows], ref_logp=_rows(output.get("ref_per_token_logps"), rows),
        )  # fmt: skip
        kept = mask & scored[:, None]
        return torch.zeros_like(old, dtype=torch.float32).masked_scatter(
            kept, self.objective.token_advantages(batch).float()
        )

    # One optimizer step: counted before its first micro-batch.

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        if self._window_left == 0:
            self._window_left = self.current_gradient_accumulation_steps
            held = self.args.steps_per_generation
            window = [self._buffered_inputs[(self._step + i) % held] for i in range(self._window_left)]
            self._window_totals = self._count(window)
            every = held * self.num_iterations // self.args.gradient_accumulation_steps
            self.objective = at_rollout(self.objective, self.state.global_step // every + 1)
        self._window_left -= 1
        return inputs

    def _count(self, window: list[dict[str, Any]]) -> Totals:
        """Over the micro-batches of a window and all processes."""
        lengths = self.accelerator.gather(torch.cat([loss_mask(inputs).sum(1) for inputs in window]))
        groups = self.accelerator.gather(torch.cat([inputs["groups"] for inputs in window]))
        present = lengths > 0
        return Totals(int(lengths.sum()), int(present.sum()), len(torch.unique(groups[present])))

    def _score(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs and entropies [B, T] of the completions, by TRL's own forward pass; the loss of MoE routers."""
        found: tuple[Tensor, Tensor, Tensor | None] = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled and torch.is_grad_enabled(),
            **{name: inputs.get(name) for name in FORWARD},
        )
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        training, processes = self.model.training, self.accelerator.num_processes
        logp, entropy, router_loss = self._score(model, inputs)
        batch = self._batch(inputs, logp, entropy)
        totals = self._window_totals if training else None
        if training and self.objective.needs_whole_step:
            batch = self.objective.prepare(batch)
            totals = self.objective.totals(batch)
        out = self.objective(batch, totals)
        loss = out.loss * (processes if training else 1)  # gradients are averaged over processes
        if router_loss is not None:
            loss = loss + self.router_aux_loss_coef * router_loss / self.current_gradient_accumulation_steps
        self._window_metrics.append((out.metrics, out.num_tokens))
        if not training or self._window_left == 0:
            self._end_window("train" if training else "eval")
        return loss

    def _batch(self, inputs: dict[str, Any], logp: Tensor, entropy: Tensor) -> TokenBatch:
        old, old_entropy = inputs.get("old_per_token_logps"), inputs.get("old_entropies")
        advantages = inputs["advantages"]
        if "importance_sampling_ratio" in inputs:  # what vLLM sampled under is not quite what is trained
            advantages = (advantages[:, None] if advantages.dim() == 1 else advantages) * inputs[
                "importance_sampling_ratio"
            ]
            advantages = advantages.expand_as(logp)
        return TokenBatch.from_padded(
            logp,
            logp.detach() if old is None else old,
            loss_mask(inputs),
            advantages=advantages,
            groups=inputs["groups"],
            entropy=entropy,
            old_entropy=entropy.detach() if old_entropy is None else old_entropy,
            ref_logp=inputs.get("ref_per_token_logps"),
        )

    def _end_window(self, mode: str) -> None:
        """Metrics of the whole step over all processes; adaptive coefficients move on."""
        metrics = combine_metrics(gather_object(self._window_metrics))
        self._window_metrics = []
        for name, value in metrics.items():
            self._metrics[mode][name if name == "entropy" else f"objective/{name}"].append(value)
        if mode == "train":
            self.objective = self.objective.adapted(metrics)

    # Adaptive coefficients go into checkpoints.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            (folder / STATE_FILE).write_text(json.dumps(self.objective.state), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (Path(checkpoint) / STATE_FILE).is_file():
            state = json.loads((Path(checkpoint) / STATE_FILE).read_text(encoding="utf-8"))
            self.objective = self.objective.with_state(state)


def check_settings(args: GRPOConfig, objective: Objective) -> None:
    """Raise ValueError for what TRL cannot give the objective, and for settings that would be without effect."""
    missing = sorted(objective.reads - GIVEN)
    if missing or objective.surrogate.pairs:
        what = ", ".join(missing) or "pairs of responses in one micro-batch"
        raise ValueError(
            f"objective {objective.name} needs {what}, which TRL's GRPOTrainer does not give: use tepo train"
        )
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    if changed := [name for name in OF_THE_LOSS if getattr(args, name) != defaults[name]]:
        raise ValueError(
            f"GRPOConfig({', '.join(changed)}) belong to TRL's own loss, which objective {objective.name} takes the "
            "place of: leave them out, and set the options of the objective (options={...})"
        )
    accumulated, held = args.gradient_accumulation_steps, args.steps_per_generation * args.num_iterations
    if held % accumulated:
        raise ValueError(
            f"gradient_accumulation_steps = {accumulated}: the tokens of an optimizer step are counted before its "
            f"first backward pass, so it must divide steps_per_generation x num_iterations = {held}"
        )
    if objective.needs_whole_step and accumulated > 1:
        raise ValueError(
            f"objective {objective.name} looks at the whole optimizer step at once: gradient_accumulation_steps = "
            f"{accumulated}, and 1 is possible"
        )


def loss_mask(inputs: Mapping[str, Any]) -> Tensor:
    """[B, T] the tokens that are trained on: completions without what tools wrote."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _rows(values: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if values is None else values[rows]
