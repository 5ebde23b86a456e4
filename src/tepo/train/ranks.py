"""The processes of one run, on one machine: all know the whole rollout, and each does its share of the work.

What is cheap and decides something (the order of the data, rewards, advantages, denominators, coefficients) is computed
by every process from the same numbers. What is expensive (sampling, judging, forward and backward passes) is dealt out,
and its results are exchanged at once. So the state of every process is the state of the run; one of them writes it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn

from tepo.config.recipe import Recipe
from tepo.errors import TepoError
from tepo.evaluate.session import Session, pick_device
from tepo.rewards.pool import auto_workers
from tepo.rewards.reward import Judged, RewardFunction
from tepo.rewards.reward import Response as Answer
from tepo.rollout import Engine, Response, Sampling
from tepo.train.run_folder import RunFolder
from tepo.train.sample import Sample, fill, stack
from tepo.train.tokens import RolloutTokens

T = TypeVar("T")

BUCKET = 2**24
"""Elements of gradients that are added up over the processes at once: 64 MiB in fp32."""


class SharedError(TepoError):
    """An error that every process of the run raises: one of them tells it."""

    def __init__(self, message: str, *, told_here: bool) -> None:
        super().__init__(message)
        self.told_here = told_here


@dataclass(frozen=True)
class Ranks:
    """One process among those of a run. The default is a run of one, for which everything here is the identity.

    Every method but `share` is collective: all processes call it at the same place.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def start(cls, device: str) -> Ranks:
        """Join the processes that a launcher (`accelerate launch`, `torchrun`) has started; `device`: model.device.

        Raises TepoError for a device that is not there, and for processes that were asked for and not started.
        """
        if any(os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() == "true" for kind in ("FSDP", "DEEPSPEED")):
            raise TepoError(
                "accelerate is to split the model up (FSDP or DeepSpeed), and tepo's processes each hold all of it: "
                "launch with --multi_gpu; for a model that does not fit there are model.lora and `tepo verl`"
            )
        asked = "cpu" if device == "auto" and os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" else device
        found = pick_device(asked)
        state = PartialState(cpu=found.type == "cpu")
        if state.num_processes == 1 and "MASTER_ADDR" in os.environ and os.environ.get("WORLD_SIZE", "1") == "1":
            raise TepoError(
                "several processes were asked for and one was started, as `accelerate launch --cpu` does without MPI: "
                "use `torchrun --nproc-per-node N -m tepo train ...`, or `accelerate launch --multi_gpu "
                "--num_processes N -m tepo train ...`, which work on a CPU as well"
            )
        if state.num_processes > 1 and found.type != "cpu":
            found = state.device
        return cls(state.process_index, state.num_processes, found)

    @property
    def writer(self) -> bool:
        """Whether this process writes the run folder and talks to the user."""
        return self.rank == 0

    def folder(self, path: Path) -> RunFolder:
        """The run folder, which one process writes."""
        return RunFolder(path) if self.writer else ReadFolder(path)

    def exchange(self, value: T) -> list[T]:
        """The values of all processes, in their order. Tensors in it must be on the CPU.

        Raises TepoError when another process has ended.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._collective(dist.all_gather_object, values, value)
        return values

    def together(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on each process. A TepoError of one is raised on all of them."""
        if self.size == 1:
            return [work()]
        result: T | None = None
        fault: str | None = None
        try:
            result = work()
        except TepoError as error:
            fault = str(error)
        results = self.exchange((result, fault))
        for _, message in results:
            if message is not None:
                raise SharedError(message, told_here=self.writer)
        return [value for value, _ in results]  # type: ignore[misc]

    def on_writer(self, work: Callable[[], T]) -> T:
        """What `work` gives on the process that writes, for all; the others wait for it."""
        return self.together(lambda: work() if self.writer else None)[0]  # type: ignore[return-value]

    def share(self, samples: Sequence[Sample], rank: int | None = None) -> list[Sample]:
        """What a process (this one) scores of `samples`, in their order: whole groups, about as many tokens each."""
        if self.size == 1:
            return list(samples)
        tokens: dict[int, int] = {}
        for sample in samples:
            tokens[sample.group] = tokens.get(sample.group, len(sample.prompt)) + sample.num_tokens
        loads = [0] * self.size
        owner = {}
        for group in sorted(tokens, key=lambda group: (-tokens[group], group)):
            owner[group] = loads.index(min(loads))
            loads[owner[group]] += tokens[group]
        wanted = self.rank if rank is None else rank
        return [sample for sample in samples if owner[sample.group] == wanted]

    def spread(self, samples: Sequence[Sample], *names: str) -> None:
        """Fill in fields of `samples` that each process has for its own share."""
        if self.size == 1:
            return
        own = self.share(samples)
        values = {name: value for name in names if own and (value := stack(own, name)) is not None}
        shares = self.exchange({name: value.cpu() for name, value in values.items()})
        for rank, share in enumerate(shares):
            if rank != self.rank:
                fill(self.share(samples, rank), **{name: value.to(self.device) for name, value in share.items()})

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients become their sums over the processes; losses have the denominators of the whole step already."""
        if self.size == 1:
            return
        present = torch.tensor([parameter.grad is not None for parameter in parameters], device=self.device).int()
        self._collective(dist.all_reduce, present, dist.ReduceOp.MAX)
        gradients = []
        for parameter, somewhere in zip(parameters, present.tolist(), strict=True):
            if somewhere and parameter.grad is None:  # nothing of the step fell to this process
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            whole = torch.cat([gradient.flatten() for gradient in bucket])
            self._collective(dist.all_reduce, whole)
            for gradient, part in zip(bucket, whole.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def same_weights(self, model: nn.Module) -> None:
        """All processes take the weights of the one that writes: an adapter starts at random."""
        if self.size == 1:
            return
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                self._collective(dist.broadcast, tensor, 0)

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on one of the processes: for what all must decide alike, such as to stop."""
        return any(self.exchange(flag))

    @contextmanager
    def open(self, recipe: Recipe, model: str | None = None) -> Iterator[Session]:
        """A session whose engine and judge share their work out.

        Raises TepoError, on all processes, for whatever one of them cannot use.
        """
        local = recipe
        if self.size > 1 and recipe.reward.workers == "auto":
            workers = max(1, auto_workers() // self.size)
            local = recipe.model_copy(update={"reward": recipe.reward.model_copy(update={"workers": workers})})
        opened: list[Session] = []
        try:
            self.together(lambda: opened.append(Session.open(local, model=model, device=self.device)))
            session = opened[0]
            if self.size > 1:
                self._agree(session)
                self.same_weights(session.policy.model)
                session.engine = SharedEngine(session.engine, self)
                session.judge = SharedJudge(session.judge, self)  # type: ignore[assignment]
            yield session
        finally:
            for session in opened:
                session.close()

    def _agree(self, session: Session) -> None:
        kept = [problem.id for problem in session.train]
        first = self.on_writer(lambda: kept)
        for rank, same in enumerate(self.exchange(kept == first)):
            if not same:
                raise SharedError(
                    f"process {rank} has other training problems than process 0: a gold answer that one of them can "
                    "read is beyond the other's limits (reward.timeout, reward.memory_mb); raise them",
                    told_here=self.writer,
                )

    def _collective(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except RuntimeError as error:
            raise TepoError(
                f"process {self.rank} lost the others ({str(error).splitlines()[0]}): what ended them stands in the "
                "output of the one that failed; go on with --resume"
            ) from error


def leave() -> bool:
    """Part from the other processes, after the last run. -> whether this is the one that wrote it."""
    if not dist.is_initialized():
        return True
    writer = dist.get_rank() == 0
    dist.destroy_process_group()
    return writer


class ReadFolder(RunFolder):
    """The run folder for the processes that do not write it."""

    def create(self, recipe: Recipe) -> None: ...
    def append_metrics(self, record: dict[str, float]) -> None: ...
    def append_skipped(self, records: Iterable[dict[str, Any]]) -> None: ...
    def rewind(self, step: int, rollout: int, evaluations: list[dict[str, Any]]) -> None: ...

    def take_up(self, recipe: Recipe, step: int, changes: list[str]) -> list[str]:
        return []

    def write_data(self, train: int, held_out: int, dropped: Mapping[str, int]) -> None: ...
    def write_rollout(self, index: int, records: Iterable[dict[str, Any]]) -> None: ...
    def write_tokens(self, index: int, tokens: RolloutTokens) -> None: ...
    def write_responses(self, name: str, records: Iterable[dict[str, Any]]) -> None: ...
    def write_evaluations(self, evaluations: list[dict[str, Any]]) -> None: ...


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one dtype in a row, at most BUCKET elements or one tensor at once."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        full = sum(g.numel() for g in bucket) + gradient.numel() > BUCKET
        if bucket and (full or bucket[0].dtype != gradient.dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


@dataclass(frozen=True)
class SharedEngine:
    """An engine that samples a part of the prompts and exchanges the responses. See Engine."""

    engine: Engine
    ranks: Ranks

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seed: int
    ) -> list[list[Response]]:
        """Copies of a prompt stay together: their random numbers depend on which of them comes first."""
        places: dict[tuple[int, ...], int] = {}
        owner = [places.setdefault(tuple(prompt), len(places)) % self.ranks.size for prompt in prompts]
        mine = [prompt for prompt, rank in zip(prompts, owner, strict=True) if rank == self.ranks.rank]
        shares = self.ranks.together(lambda: self.engine.generate(mine, count, sampling, seed))
        parts = [iter(share) for share in shares]
        return [next(parts[rank]) for rank in owner]

    def update_weights(self) -> None:
        self.engine.update_weights()

    def close(self) -> None:
        self.engine.close()


@dataclass(frozen=True)
class SharedJudge:
    """A reward function that judges a part of the answers and exchanges the verdicts. See RewardFunction."""

    judge: RewardFunction
    ranks: Ranks

    def __call__(self, answers: Sequence[Answer]) -> Judged:
        rank, size = self.ranks.rank, self.ranks.size
        shares = self.ranks.together(lambda: self.judge(answers[rank::size]))
        lists: dict[str, list[Any]] = {}
        for name in (entry.name for entry in dataclasses.fields(Judged)):
            lists[name] = [None] * len(answers)
            for start, share in enumerate(shares):
                lists[name][start::size] = getattr(share, name)
        return Judged(**lists)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.judge, name)

    def close(self) -> None:
        self.judge.close()
