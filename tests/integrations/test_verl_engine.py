"""An optimizer step in verl's actor worker gives the loss and the gradient of ours, on the same tokens and weights.

verl's ActorRolloutRefWorker, its FSDP2 engine and `update_actor` run on the CPU with gloo, in fp32, on nested tensors
cut into micro-batches (verl_cpu.py says what stands in for a GPU). Runs where verl 0.9 and Ray are (.ci/differential).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: .ci/differential has an environment with it")
pytest.importorskip("ray", reason="Ray is not installed: .ci/differential has an environment with it")

from tepo.config.recipe import ModelConfig, TrainerConfig
from tepo.data import Problem
from tepo.data.arithmetic import generate
from tepo.objectives import get_objective
from tepo.policy import Policy, load_model
from tepo.rewards.verdict import Status, Verdict
from tepo.rollout import Response
from tepo.train.sample import Sample
from tepo.train.update import Updater

PROMPTS, RESPONSES, MINI_BATCH = 4, 4, 8
ROUNDING = (2e-5, 1e-5)
"""Relative, by update; more room in the first, whose gradient is a difference of nearly equal parts (found: 0.8e-5)."""
MASKED = {"kl_mask": {"beta": 0.5}}
WHOLE_BATCH: dict[str, dict[str, Any]] = {
    "tepo": MASKED,
    "grpo": {"ref_kl": {"beta": 0.5}},
    "dapo": {},
    "gspo": {},
    "gtpo": {},
}
ON_TWO_RANKS = ("tepo", "grpo")
BY_NAME: dict[str, dict[str, Any]] = {"dapo": {}, "gspo": {}, "tepo_v1": {"clip_high": 0.01}}
"""Those that a policy loss of verl's registry can carry."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = load_model(ModelConfig())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rollout(objective: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Responses of the embedded model, a reward that varies in every group, and what verl's trainer adds to them."""
    model, tokenizer = load_model(ModelConfig(), trainable=False)
    torch.manual_seed(1)
    problems, _ = generate(0, train=PROMPTS, test=1)
    rows: list[dict[str, Any]] = []
    for group, problem in enumerate(problems):
        prompt = tokenizer(problem.text, return_tensors="pt", add_special_tokens=True)["input_ids"]
        sampled = model.generate(prompt, do_sample=True, max_new_tokens=12, num_return_sequences=RESPONSES, top_k=0)
        for number, response in enumerate(sampled[:, prompt.shape[1] :]):
            response = response[: 12 - 2 * number]
            rows.append({"prompt": prompt[0], "response": response, "mask": torch.ones_like(response), "group": group})
    rewards = torch.tensor([float(row["response"].sum() % 7) for row in rows])
    groups = torch.tensor([row["group"] for row in rows])
    advantages = get_objective("grpo").advantages(rewards, groups)
    for row, advantage in zip(rows, advantages, strict=True):
        row["advantages"] = advantage * torch.linspace(0.5, 1.5, len(row["response"])).pow(float(objective == "gtpo"))
    if get_objective(objective, **options).needs_reference:
        for row in rows:
            row["ref_log_prob"] = -1.5 + 0.1 * torch.arange(len(row["response"]), dtype=torch.float32)
    return rows


def settings(folder: Path, name: str, options: dict[str, Any]) -> list[str]:
    actor, fsdp = "actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config"
    needs = get_objective(name, **options).needs
    return [
        f"actor_rollout_ref.model.path={folder}",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.n={RESPONSES}",
        f"{actor}.strategy=fsdp2",
        f"{fsdp}.strategy=fsdp2",
        f"+{fsdp}.mixed_precision={{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}}",
        f"{fsdp}.use_torch_compile=False",
        f"{actor}.optim.lr=1e-3",
        f"{actor}.optim.clip_grad=1e9",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu=70",
        f"{actor}.calculate_entropy={'entropy' in needs}",
        f"{actor}.use_kl_loss={'ref_logp' in needs}",
        f"{actor}.policy_loss._target_=tepo.integrations.verl.losses.ObjectiveLossConfig",
        f"{actor}.policy_loss.loss_mode={name if name.startswith('tepo') else 'tepo_' + name}",
        *(
            f"++{actor}.policy_loss.options.{key}={value}"
            for key, value in options.items()
            if not isinstance(value, dict)
        ),
        *(
            f"++{actor}.policy_loss.options.{key}.{inner}={value}"
            for key, section in options.items()
            if isinstance(section, dict)
            for inner, value in section.items()
        ),
    ]


def cases(folder: Path, world: int) -> dict[str, dict[str, Any]]:
    """By name; the rows of a rank's first mini-batch find the policy that sampled."""
    share, first = PROMPTS * RESPONSES // world, MINI_BATCH // world
    on_policy = [row % share < first for row in range(PROMPTS * RESPONSES)]
    common = {"mini_batch": MINI_BATCH, "on_policy": on_policy}
    found = {
        name: common
        | {"whole_batch": True, "rows": rollout(name, options), "overrides": settings(folder, name, options)}
        for name, options in WHOLE_BATCH.items()
        if world == 1 or name in ON_TWO_RANKS
    }
    if world == 1:
        for name, options in BY_NAME.items():
            case = {"whole_batch": False, "rows": rollout(name, options), "overrides": settings(folder, name, options)}
            found[f"{name} by name"] = common | case | {"on_policy": None}
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def in_verl(world: int, given: dict[str, dict[str, Any]], scratch: Path) -> list[dict[str, Any]]:
    """The results of each rank."""
    torch.save(given, scratch / "given")
    port = free_port()
    script = Path(__file__).with_name("verl_cpu.py")
    started = []
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        command = [sys.executable, str(script), str(scratch / "given"), str(scratch / "found")]
        log = (scratch / f"log.{rank}").open("w")
        started.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    codes = [process.wait() for process in started]
    assert not any(codes), "\n".join((scratch / f"log.{rank}").read_text()[-3000:] for rank in range(world))
    return [torch.load(scratch / f"found.{rank}", weights_only=False) for rank in range(world)]


Results = tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def one_process(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    given = cases(model_folder, 1)
    return given, in_verl(1, given, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two_processes(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    given = cases(model_folder, 2)
    return given, in_verl(2, given, tmp_path_factory.mktemp("two"))


def in_our_trainer(
    name: str, options: dict[str, Any], rows: list[dict[str, Any]], weights: dict[str, torch.Tensor], fresh: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of our own Updater. fresh: the policy still is the one that sampled."""
    model, tokenizer = load_model(ModelConfig())
    model.load_state_dict(weights, strict=False)
    config = TrainerConfig(max_grad_norm=1e9, tokens_per_microbatch=60)
    updater = Updater(
        Policy(model, tokenizer), get_objective(name, **options), config,
        reference=Policy(load_model(ModelConfig(), trainable=False)[0], tokenizer),
    )  # fmt: skip
    samples = []
    for row in rows:
        ids = tuple(row["response"].tolist())
        samples.append(
            Sample(
                Problem("", "", ""),
                row["group"],
                tuple(row["prompt"].tolist()),
                Response(ids, (0.0,) * len(ids), True),
                Verdict(Status.CORRECT, 1.0),
                0.0,
                old_logp=None if fresh else row["old_log_probs"],
                old_entropy=None if fresh else row["old_entropy"],
                ref_logp=row.get("ref_log_prob"),
                token_advantages=row["advantages"],
            )
        )
    found: list[dict[str, torch.Tensor]] = []
    updater.optimizer.step = lambda *_: found.append(  # type: ignore[method-assign, assignment]
        {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    )
    return updater.step(samples, 1e-3)["loss"], found[0]


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def check(results: Results, case: str, name: str, options: dict[str, Any], fresh_first: bool) -> None:
    given, ranks = results
    rows = given[case]["rows"]
    share, part = len(rows) // len(ranks), MINI_BATCH // len(ranks)
    for rank, result in enumerate(ranks):
        old = result[case]["old"]
        for row, logp, entropy in zip(rows[rank * share :], old["old_log_probs"], old["entropy"], strict=False):
            row |= {"old_log_probs": logp, "old_entropy": entropy}
    found = ranks[0][case]
    assert len(found["gradients"]) == len(rows) // MINI_BATCH == 2
    for step, (weights, gradients) in enumerate(zip(found["weights"], found["gradients"], strict=True)):
        firsts = [rank * share + step * part for rank in range(len(ranks))]
        mini = [row for first in firsts for row in rows[first : first + part]]
        loss, ours = in_our_trainer(name, options, mini, weights, fresh=fresh_first and step == 0)
        assert found["metrics"]["loss"][step] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert (flat(gradients) - flat(ours)).norm() <= ROUNDING[step] * flat(ours).norm()
        assert flat(ours).norm() > 0
    if "kl_mask" in options:
        assert found["metrics"]["objective/kl_mask_fraction"][0] == 0
        assert found["metrics"]["objective/kl_mask_fraction"][1] > 0
        assert found["metrics"]["objective/log_ratio_max"][1] > 0


@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_update_actor_is_a_step_of_ours(one_process: Results, name: str) -> None:
    """Both mini-batches of a rollout, with the loss that `set_loss_fn` puts into the engine."""
    check(one_process, name, name, WHOLE_BATCH[name], fresh_first=True)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_registered_policy_loss_is_the_same(one_process: Results, name: str) -> None:
    """`loss_mode=tepo_NAME` alone, with verl's own ppo_loss around it."""
    check(one_process, f"{name} by name", name, BY_NAME[name], fresh_first=False)


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_are_one_step(two_processes: Results, name: str) -> None:
    """Two FSDP ranks, whose responses have different numbers of tokens."""
    check(two_processes, name, name, WHOLE_BATCH[name], fresh_first=True)
