"""The tokens of a rollout, beside its texts: ids as sampled, and what was said of them at that time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from tepo.files import replace_bytes
from tepo.train.sample import Sample

MEASURED = ("old_logp", "old_entropy", "ref_logp", "token_advantages")
"""Fields of a sample that are kept where some sample of the rollout has them; NaN for those that have not."""


@dataclass(frozen=True)
class RolloutTokens:
    """S responses with N tokens in all, prompts and responses in the order of the rollout's records.

    ids, logp: [N] tokens as sampled, and the log-probs under which they were.
    measured: MEASURED [N] by the policy before its updates, as far as training needed them; NaN elsewhere, so for the
        responses that could have no gradient, and for tokens of a prefix that is not scored.
    lengths, groups, prefixes: [S] tokens of each response, its prompt, and how many tokens of it were given to it.
    prompts, prompt_lengths: [P] token ids of the prompts, one after the other, and [G] how many each has.
    """

    ids: Tensor
    logp: Tensor
    lengths: Tensor
    groups: Tensor
    prefixes: Tensor
    prompts: Tensor
    prompt_lengths: Tensor
    measured: dict[str, Tensor]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        """From the samples of a rollout, groups numbered from 0 in order."""
        prompts = dict.fromkeys((sample.group, sample.prompt) for sample in samples)
        return cls(
            ids=torch.tensor([token for sample in samples for token in sample.response.ids], dtype=torch.int32),
            logp=torch.tensor([logp for sample in samples for logp in sample.response.logps]),
            lengths=torch.tensor([len(sample.response.ids) for sample in samples]),
            groups=torch.tensor([sample.group for sample in samples]),
            prefixes=torch.tensor([sample.prefix for sample in samples]),
            prompts=torch.tensor([token for _, prompt in prompts for token in prompt], dtype=torch.int32),
            prompt_lengths=torch.tensor([len(prompt) for _, prompt in prompts]),
            measured={
                name: torch.cat([_whole(sample, name) for sample in samples])
                for name in MEASURED
                if any(getattr(sample, name) is not None for sample in samples)
            },
        )

    def write(self, path: Path) -> None:
        """The whole file or nothing of it: safetensors, 4 bytes a value."""
        fields = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        replace_bytes(path, save(fields | {f"measured.{name}": value for name, value in self.measured.items()}))

    @classmethod
    def read(cls, path: Path) -> Self:
        """The inverse of `write`."""
        tensors = load_file(path)
        measured = {name: tensors.pop(f"measured.{name}") for name in MEASURED if f"measured.{name}" in tensors}
        return cls(**tensors, measured=measured)

    def response(self, index: int) -> slice:
        """Where the tokens of response `index` are among the N."""
        start = int(self.lengths[:index].sum())
        return slice(start, start + int(self.lengths[index]))

    def prompt(self, index: int) -> list[int]:
        """Token ids of the prompt of response `index`."""
        group = int(self.groups[index])
        start = int(self.prompt_lengths[:group].sum())
        ids: list[int] = self.prompts[start : start + int(self.prompt_lengths[group])].tolist()
        return ids


def _whole(sample: Sample, name: str) -> Tensor:
    """[tokens] float32 of a response: a field of its scored tokens, NaN before them or where it is missing."""
    whole = torch.full((len(sample.response.ids),), torch.nan)
    value = getattr(sample, name)
    if value is not None:
        whole[sample.prefix :] = value.to("cpu", torch.float32)
    return whole
