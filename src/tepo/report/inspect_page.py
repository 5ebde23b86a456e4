"""`tepo inspect`: the token view, on one page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tepo.objectives import Objective
from tepo.policy import Policy
from tepo.report.inspect_credit import Credit, View, all_credits, make_batch, objectives, view
from tepo.report.inspect_subject import Shown, Subject, of_prompt, of_run
from tepo.report.page import asset, write_page
from tepo.report.page_kl import score, starting_policy
from tepo.report.run import Run

UNREADABLE = "\ufffd"
FILE = "inspect.html"


def inspect_run(
    folder: Path,
    *,
    rollout: int | None = None,
    checkpoint: int | None = None,
    names: Sequence[str],
    count: int = 32,
    top: int = 5,
    output: Path | None = None,
) -> Path:
    """Write the token view of a stored rollout (`of_run`), in the run folder if nothing else is said. -> its path.

    names: objectives to look at beside the run's own. count: responses. top: likeliest tokens at each place.
    Raises TepoError when something of it is not stored, or an objective cannot be looked at.
    """
    run = Run.open(folder)
    subject = of_run(run, rollout, checkpoint, count)
    chosen = objectives(names, subject.objective)
    reference = None
    if any("ref_logp" in objective.reads for objective in chosen.values()):
        rows = [shown.row for shown in subject.shown]
        reference = score(starting_policy(run), rows, run.recipe.trainer.tokens_per_microbatch)
    return _write(subject, chosen, reference, top, output or run.folder / FILE)


def inspect_prompt(
    model: str,
    prompt: str,
    *,
    names: Sequence[str],
    answer: str | None = None,
    count: int = 8,
    top: int = 5,
    overrides: Sequence[str] = (),
    output: Path | None = None,
) -> Path:
    """Sample responses to a prompt and write their token view, `inspect.html` if nothing else is said. -> its path.

    names: objectives; they have something to do where there is the right answer, and so rewards. The model is its own
    reference. Raises TepoError for whatever cannot be used.
    """
    chosen = objectives(names, None) if answer is not None and count > 1 else {}
    subject = of_prompt(model, prompt, answer, count, overrides)
    reference = score(subject.policy, [one.row for one in subject.shown], subject.recipe.trainer.tokens_per_microbatch)
    return _write(subject, chosen, reference, top, output or Path(FILE))


def _write(
    subject: Subject, chosen: dict[str, Objective], reference: Sequence[Tensor] | None, top: int, path: Path
) -> Path:
    seen = view(subject.policy, subject, top)
    batch = make_batch(subject, seen, reference)
    credits = all_credits(batch, subject, chosen)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(
        path,
        "inspect.html",
        page_data(subject, seen, chosen, credits),
        [asset("text.js"), asset("tokens.js"), asset("inspect.js")],
        [asset("inspect.css")],
        title=subject.title,
        kind="token inspector",
        lead=subject.lead,
        has_objectives=bool(chosen),
    )
    return path


def page_data(subject: Subject, seen: View, chosen: dict[str, Objective], credits: dict[str, Credit]) -> dict[str, Any]:
    """What the page's script reads: numbers as base64 of half precision, NaN where nothing is known."""
    shown = subject.shown
    sampled, old_logp, old_entropy = (
        torch.cat([getattr(one, name) for one in shown]) for name in ("logp", "old_logp", "old_entropy")
    )
    at_sampling = torch.where(old_logp.isnan(), sampled, old_logp).double()
    used = {token for one in shown for token in one.ids} | set(seen.top_ids.flatten().tolist())
    texts = token_texts(subject.policy, sorted(used))
    return {
        "rows": [_row(one, texts, subject.policy) for one in shown],
        "texts": texts,
        "ids": _packed(torch.tensor([token for one in shown for token in one.ids[one.given :]]), np.int32),
        "fields": {
            "logp": _packed(seen.logp),
            "old_logp": _packed(at_sampling),
            "log_ratio": _packed(seen.logp - at_sampling),
            "entropy": _packed(seen.entropy),
            "old_entropy": _packed(old_entropy),
            "entropy_change": _packed(seen.entropy - old_entropy.double()),
        },
        "objectives": [
            {
                "name": label,
                "title": chosen[label].title,
                "weight": _packed(given.weight),
                "advantage": _packed(given.advantage),
                "ratio": _packed(given.log_ratio),
                "clipped": _packed(given.clipped, np.uint8),
                "mask": _packed(given.masked, np.uint8) if "kl_mask" in {t.name for t in chosen[label].terms} else None,
            }
            for label, given in credits.items()
        ],
        "top": {
            "count": seen.top_ids.shape[1],
            "ids": _packed(seen.top_ids.flatten(), np.int32),
            "probs": _packed(seen.top_probs.flatten()),
        },
    }


def _row(one: Shown, texts: dict[int, str], policy: Policy) -> dict[str, Any]:
    record = one.record
    given = policy.tokenizer.decode(one.ids[: one.given]) if one.given else ""
    row = {
        "problem": record["problem"],
        "gold": record.get("answer"),
        "answer": record.get("extracted"),
        "verdict": record.get("status"),
        "reward": record.get("reward"),
        "group": one.group,
        "cut": record["finish_reason"] == "length",
        "tokens": len(one.ids) - one.given,
        "given": given,
        "joined": joined(one.ids[one.given :], texts, policy),
    }
    return {key: value for key, value in row.items() if value not in (None, "", {})}


def token_texts(policy: Policy, ids: Sequence[int]) -> dict[int, str]:
    """The text of each token as it stands behind another one; what is no character by itself has UNREADABLE in it."""
    tokenizer = policy.tokenizer
    anchor = next(iter(tokenizer("a", add_special_tokens=False)["input_ids"]), None)
    before = "" if anchor is None else tokenizer.decode([anchor])
    front = [] if anchor is None else [anchor]
    return {token: str(tokenizer.decode([*front, token]))[len(before) :] for token in ids}


def joined(ids: Sequence[int], texts: dict[int, str], policy: Policy) -> dict[int, str]:
    """By place, the text of characters that several tokens make: at the last of them, the others are empty."""
    out: dict[int, str] = {}
    start = 0
    while start < len(ids):
        if UNREADABLE not in texts[ids[start]]:
            start += 1
            continue
        end = start + 1
        while end < len(ids) and UNREADABLE in texts[ids[end]]:
            end += 1
        out |= dict.fromkeys(range(start, end - 1), "")
        out[end - 1] = str(policy.tokenizer.decode(list(ids[start:end])))
        start = end
    return out


def _packed(values: Tensor, kind: type[np.generic] = np.float16) -> str:
    """base64 of [N] numbers, lowest byte first."""
    array = values.detach().cpu().numpy()
    with np.errstate(over="ignore"):  # beyond half precision is infinity, and drawn as the most there is
        array = array.astype(np.dtype(kind).newbyteorder("<"))
    return base64.b64encode(array.tobytes()).decode()
