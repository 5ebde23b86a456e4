"""From a problem to the token ids that a model sees."""

from collections.abc import Callable, Sequence
from typing import Any

from tepo.data.problem import ChatMessage, Problem
from tepo.errors import TepoError

PLACE = "{problem}"


def resolve_template(template: str, tokenizer: Any) -> str:
    """`auto` becomes `chat` for a tokenizer with a chat template and `plain` for one without; others stay.

    Raises:
        TepoError: `chat` without a chat template, or a text without `{problem}`.
    """
    has_chat = bool(getattr(tokenizer, "chat_template", None))
    if template == "auto":
        return "chat" if has_chat else "plain"
    if template == "chat" and not has_chat:
        raise TepoError(
            "data.template=chat: the model's tokenizer has no chat template; "
            "use data.template=plain or a text that contains {problem}"
        )
    if template not in ("chat", "plain") and PLACE not in template:
        raise TepoError(f"data.template={template!r}: allowed are auto, chat, plain, or a text that contains {PLACE}")
    return template


def render_prompt(
    problem: Problem, tokenizer: Any, template: str, system: str | None = None, instruction: str | None = None
) -> list[int]:
    """Token ids of the prompt, begin-of-sequence token included where the tokenizer puts one; never two.

    `instruction` follows the question on a line of its own. `tokenizer` is a Hugging Face tokenizer.

    Raises:
        TepoError: the template does not fit the tokenizer, a system message without a chat template, no tokens.
    """
    template = resolve_template(template, tokenizer)
    if template == "chat":
        messages = [dict(message) for message in chat_messages(problem, system, instruction)]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template writes the special tokens itself.
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    else:
        if system is not None:
            raise TepoError(
                f"data.system: only a chat template has a place for one, and the template is {template!r}; "
                f"leave it out or put it into data.template"
            )
        question = _with_instruction(problem.text, instruction)
        ids = _ids_with_bos(question if template == "plain" else template.replace(PLACE, question), tokenizer)
    if not ids:
        raise TepoError(f"problem {problem.id}: its prompt has no tokens")
    return [int(token) for token in ids]


def chat_messages(problem: Problem, system: str | None, instruction: str | None) -> list[ChatMessage]:
    if isinstance(problem.prompt, str):
        messages: list[ChatMessage] = [{"role": "user", "content": _with_instruction(problem.prompt, instruction)}]
    else:
        messages = list(problem.prompt)
        if instruction:
            last = messages[-1]
            messages[-1] = {"role": last["role"], "content": _with_instruction(last["content"], instruction)}
    if system is None:
        return messages
    # The recipe's system message stands for the data set's own: chat templates take one.
    return [{"role": "system", "content": system}, *(message for message in messages if message["role"] != "system")]


def _with_instruction(question: str, instruction: str | None) -> str:
    return f"{question}\n{instruction}" if instruction else question


def _ids_with_bos(text: str, tokenizer: Any) -> list[int]:
    """Ids of the text alone, after the tokenizer's begin token if it normally puts one. Its end token is never put."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    begin = tokenizer.bos_token_id
    if begin is None or ids[:1] == [begin]:
        return ids
    return [begin, *ids] if list(tokenizer(text)["input_ids"])[:1] == [begin] else ids


def drop_long_prompts(
    problems: Sequence[Problem], render: Callable[[Problem], list[int]], limit: int
) -> tuple[list[Problem], int]:
    """Problems whose prompt has at most `limit` tokens, and how many were left out.

    Raises:
        TepoError: none is short enough.
    """
    kept = [problem for problem in problems if len(render(problem)) <= limit]
    if problems and not kept:
        raise TepoError(f"data.max_prompt_tokens={limit}: all {len(problems)} prompts are longer")
    return kept, len(problems) - len(kept)
