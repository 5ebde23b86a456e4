"""vLLM as the engine of a run: the log-probs it samples under are the trained policy's, before and after updates.

Runs where vLLM is installed (`.ci/vllm` makes such an environment); the merging of adapters is tested everywhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from models import character_tokenizer, tiny_model

from tepo.config.recipe import LoraConfig, ModelConfig
from tepo.errors import TepoError
from tepo.policy import Policy, Row, load_model
from tepo.policy.load import _add_adapter
from tepo.rollout import Response, Sampling, vllm_server
from tepo.rollout.vllm import VllmEngine, merged_weights
from tepo.rollout.vllm_server import VllmServer
from tepo.rollout.vllm_worker import WeightReceiver

installed = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not installed, reason="needs vLLM, in an environment of its own (.ci/vllm)")

PROMPTS = [[3, 4, 5, 6], [7, 8, 9], [5]]


def randomize_adapter(policy: Policy) -> None:
    for name, parameter in policy.model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)


def test_merged_weights_are_those_of_the_merged_model() -> None:
    """Under the names of the model without an adapter, and without touching the adapted layers."""
    adapted = _add_adapter(tiny_model(), LoraConfig(rank=2), "tiny")
    policy = Policy(adapted, character_tokenizer())
    randomize_adapter(policy)
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    merged = dict(merged_weights(policy))
    assert all(torch.equal(before[name], tensor) for name, tensor in adapted.state_dict().items())
    whole: Any = adapted
    expected = whole.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor)


@pytest.mark.skipif(installed, reason="vLLM is installed")
def test_without_vllm_the_engine_says_what_to_install() -> None:
    with pytest.raises(TepoError, match=r"rollout.engine = 'vllm' needs vLLM: pip install"):
        VllmEngine(Policy(tiny_model(), character_tokenizer()), "fp32", 64, 0.1)


def largest_difference(policy: Policy, groups: list[list[Response]]) -> float:
    rows = [Row(prompt, response.ids) for prompt, group in zip(PROMPTS, groups, strict=True) for response in group]
    stated = torch.tensor([logp for group in groups for response in group for logp in response.logps])
    with policy.evaluating():
        return float((policy.score(rows).logp - stated).abs().max())


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    opened = VllmEngine(adapted_policy(), "fp32", 64, 0.1)
    yield opened
    opened.close()


def adapted_policy() -> Policy:
    model, tokenizer = load_model(ModelConfig(name="embedded", lora=LoraConfig(rank=4)))
    return Policy(model, tokenizer)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server on this machine."""
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = load_model(ModelConfig(name="embedded"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--host", "127.0.0.1", "--port", str(port),
        "--worker-extension-cls", "tepo.rollout.vllm_worker.WeightReceiver", "--logprobs-mode", "processed_logprobs",
        "--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--gpu-memory-utilization", "0.1",
    ]  # fmt: skip
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=out, stderr=out, start_new_session=True)
    try:
        for _ in range(300):
            assert process.poll() is None, log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                    break
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module", params=["here", "server"])
def any_engine(request: pytest.FixtureRequest) -> Iterator[VllmEngine | VllmServer]:
    """Started with the weights of the base model; the server's own are another's, and are replaced."""
    if request.param == "here":
        yield request.getfixturevalue("engine")
        return
    opened = VllmServer(adapted_policy(), request.getfixturevalue("server"), 64)
    yield opened
    opened.close()


@needs_vllm
def test_a_server_that_cannot_be_used_is_refused(server: str) -> None:
    with pytest.raises(TepoError, match=r"takes 256 tokens of prompt and response, and the run may have 257"):
        VllmServer(adapted_policy(), server, 257)


def test_no_server_is_an_error_that_says_how_to_start_one() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # never listens
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(
            TepoError, match=rf"rollout.vllm_server = {address} does not answer .*api_server --model MODEL"
        ):
            VllmServer(Policy(tiny_model(), character_tokenizer()), address, 64)


def test_weights_are_sent_in_parts_and_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(vllm_server, "PART_BYTES", 2000)
    parts = list(vllm_server._parts(merged_weights(Policy(model, character_tokenizer())), torch.bfloat16))
    assert len(parts) > 3

    class Worker(WeightReceiver):
        def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
            self.loaded = dict(weights_iterator)

    worker = Worker()
    for part in parts:
        worker.tepo_receive(part)
    worker.tepo_load()
    expected = model.state_dict()
    assert worker.loaded.keys() == expected.keys()
    assert all(torch.equal(worker.loaded[name], tensor.bfloat16()) for name, tensor in expected.items())


@needs_vllm
def test_sampled_log_probs_follow_the_weights(any_engine: VllmEngine | VllmServer) -> None:
    """Those of the base model, and those of an adapter; what was cached of the prompts is not used again."""
    engine = any_engine
    sampling = Sampling(1.0, 20)
    before = engine.generate(PROMPTS, 4, sampling, seed=1)
    assert largest_difference(engine.policy, before) < 1e-3
    with torch.no_grad():
        for name, parameter in engine.policy.model.named_parameters():
            if "lora_" not in name:
                parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    stale = engine.generate(PROMPTS, 4, sampling, seed=1)
    assert largest_difference(engine.policy, stale) > 1e-2
    engine.update_weights()
    assert largest_difference(engine.policy, engine.generate(PROMPTS, 4, sampling, seed=1)) < 1e-3
    randomize_adapter(engine.policy)
    engine.update_weights()
    assert largest_difference(engine.policy, engine.generate(PROMPTS, 4, sampling, seed=1)) < 1e-3


@needs_vllm
def test_responses_are_as_the_other_engine_gives_them(any_engine: VllmEngine | VllmServer) -> None:
    """Ends, limits, greedy copies and repetition by the seed."""
    engine = any_engine
    ends = engine.policy.end_tokens
    groups = engine.generate(PROMPTS, 8, Sampling(1.0, 6), seed=2)
    for response in (response for group in groups for response in group):
        assert len(response.ids) == len(response.logps) <= 6
        assert response.finished == (response.ids[-1] in ends)
        assert not ends & set(response.ids[:-1])
    assert len({response.ids for response in groups[1]}) > 2
    assert engine.generate(PROMPTS, 8, Sampling(1.0, 6), seed=2) == groups
    assert engine.generate(PROMPTS, 8, Sampling(1.0, 6), seed=3) != groups
    greedy = engine.generate(PROMPTS, 2, Sampling(0.0, 6), seed=0)
    assert all(first == second for first, second in greedy)
    assert largest_difference(engine.policy, greedy) < 1e-3


@needs_vllm
@pytest.mark.parametrize("where", ["here", "server"])
def test_a_run_trains_with_it(tmp_path: Path, where: str, request: pytest.FixtureRequest) -> None:
    """The log-probs of every step's samples, under weights that have changed in between, are the policy's own."""
    folder = tmp_path / "run"
    settings = [
        "rollout.engine=vllm", "rollout.vllm_memory=0.2", "trainer.steps=6", "trainer.prompts_per_rollout=8",
        "trainer.responses_per_prompt=4", "trainer.updates_per_rollout=2", "trainer.learning_rate=3e-4",
        "data.test_problems=16", "evaluation.every=null", "checkpoint.every=null", "reward.workers=1",
        f"output={folder}",
    ]  # fmt: skip
    if where == "server":
        settings.append(f"rollout.vllm_server={request.getfixturevalue('server')}")
    # A process of its own: there can be one such engine in each.
    command = [sys.executable, "-m", "tepo", "train", "--config", "arithmetic", *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in metrics if "mismatch_max" in line]
    assert {line["rollout"] for line in measured} == {0, 1, 2}
    assert max(line["mismatch_max"] for line in measured) < 1e-3
    # The policy did move by more than that between the rollouts.
    assert max(line["log_ratio_max"] for line in measured) > 1e-2
