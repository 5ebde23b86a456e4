"""The tokens of a rollout that a run keeps for those who look at it later."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tepo.train.tokens import RolloutTokens


def records_of(folder: Path, rollout: int) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / "rollouts" / f"rollout_{rollout:06d}.jsonl").read_text().splitlines()
    ]


def test_tokens_of_a_rollout_are_those_of_its_texts(run: Any) -> None:
    folder, _ = run()
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoints" / "step_8")
    for rollout in (0, 1):
        tokens = RolloutTokens.read(folder / "rollouts" / f"rollout_{rollout:06d}.safetensors")
        records = records_of(folder, rollout)
        assert len(tokens.lengths) == len(records) == 32
        assert int(tokens.lengths.sum()) == len(tokens.ids) == len(tokens.logp)
        for index, record in enumerate(records):
            where = tokens.response(index)
            assert tokenizer.decode(tokens.ids[where].tolist(), skip_special_tokens=True) == record["response"]
            assert tokenizer.decode(tokens.prompt(index)).endswith(record["problem"])
            # Scored where the response can have a gradient, and only there, also those of the first update.
            scored = tokens.measured["old_logp"][where]
            if record["advantage"] == 0:
                assert scored.isnan().all()
            else:
                torch.testing.assert_close(scored, tokens.logp[where], rtol=0, atol=1e-5)
                assert (tokens.measured["old_entropy"][where] >= 0).all()


def test_tokens_are_kept_as_often_as_asked(run: Any) -> None:
    every_other, _ = run("rollout.save_tokens=2", output="two")
    none, _ = run("rollout.save_tokens=null", output="none")
    assert sorted(path.name for path in every_other.glob("rollouts/*.safetensors")) == ["rollout_000000.safetensors"]
    assert not list(none.glob("rollouts/*.safetensors"))
    assert (every_other / "metrics.jsonl").read_text().count("\n") == 8


@pytest.mark.parametrize("objective", ["skpo", "ppo"])
def test_what_varies_within_a_response_is_kept(run: Any, objective: str) -> None:
    folder, _ = run(f"objective={objective}", "trainer.steps=1", "trainer.updates_per_rollout=1")
    tokens = RolloutTokens.read(folder / "rollouts" / "rollout_000000.safetensors")
    for index, prefix in enumerate(tokens.prefixes.tolist()):
        values = tokens.measured["token_advantages"][tokens.response(index)]
        assert values[:prefix].isnan().all()
        assert values[prefix:].isfinite().all()
