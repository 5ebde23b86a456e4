"""The order in which problems are met: endless, shuffled anew in each epoch, resumable exactly."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from tepo.data.problem import Problem
from tepo.errors import TepoError


class PromptStream:
    """Endless epochs over `problems`, each a permutation that `seed` and the epoch's number fix.

    The whole state is (epoch, position): `load_state_dict` continues with exactly the problem that would have come
    next. Every problem comes once an epoch; `take` may reach over the end of one.
    """

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        if not problems:
            raise TepoError("data: no training problems are left to draw from")
        self._problems = problems
        self._seed = seed
        self._fingerprint = _fingerprint(problems)
        self._epoch, self._position = 0, 0
        self._order = self._shuffled(0)

    @property
    def epoch(self) -> int:
        """Completed epochs."""
        return self._epoch

    @property
    def position(self) -> int:
        """Problems taken in the current epoch."""
        return self._position

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems."""
        taken: list[Problem] = []
        while len(taken) < count:
            wanted = self._order[self._position : self._position + count - len(taken)]
            taken += [self._problems[index] for index in wanted]
            self._position += len(wanted)
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled(self._epoch)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs, as plain values."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed, "problems": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved state.

        Raises:
            TepoError: the state belongs to another seed or to other problems, so it names no place in this order.
        """
        if state["seed"] != self._seed:
            raise TepoError(
                f"resume: the saved order of problems has seed {state['seed']}, this run has seed {self._seed}"
            )
        if state["problems"] != self._fingerprint:
            raise TepoError(
                "resume: the training problems are not those of the saved run (other ids, questions, answers "
                "or order); resume with the same `data` section and files"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled(self._epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._problems)))
        # A text seeds Random through SHA-512: the same on every machine, and unrelated for neighbouring epochs.
        random.Random(f"prompts {self._seed} {epoch}").shuffle(order)
        return order


def _fingerprint(problems: Sequence[Problem]) -> str:
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(repr((problem.id, problem.text, problem.answer)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]
